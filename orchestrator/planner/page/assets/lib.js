// Small helpers every chart uses: elements, colours of the style sheet, figures, ticks, the tooltip, redrawing.
const data = JSON.parse(document.getElementById('data').textContent);
const byId = (id) => document.getElementById(id);

function el(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS('http://www.w3.org/2000/svg', name), attributes, children);
}

function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (key === 'style') node.style.cssText = value;
    else if (value !== null && value !== undefined) node.setAttribute(key, value);
  }
  node.append(...children); // strings become text, never markup
  return node;
}

// One entry of a legend: a swatch (a colour, or the name of a shape) and what it stands for
function keyItem(swatch, text, title = null) {
  const look = swatch.startsWith('var(') ? { style: `background:${swatch}` } : { class: swatch };
  return el('li', { title }, el('i', look), el('span', {}, text));
}

// Text in a chart
function label(x, y, text, { anchor = 'start', strong = false } = {}) {
  return svg('text', { x, y, 'text-anchor': anchor, class: strong ? 'strong' : null }, text);
}

// 'var(--c1)' → the colour it stands for now: a canvas does not know variables
function colour(text) {
  const name = /^var\((.+)\)$/.exec(text);
  return name ? getComputedStyle(document.documentElement).getPropertyValue(name[1]).trim() : text;
}

// One colour per index of `count`: distinct ones for a few, a ramp of hues for many
function indexColour(index, count) {
  if (count <= 8) return colour(`var(--c${index + 1})`);
  const at = index / (count - 1);
  return `oklch(${(0.58 + 0.2 * at).toFixed(3)} 0.15 ${(262 + 190 * at).toFixed(1)})`;
}

// Black or white, whichever reads better on a colour of ours (#rrggbb, or oklch with its lightness first)
function inkOn(shade) {
  if (shade.startsWith('oklch')) return Number(shade.slice(6, 11)) > 0.68 ? '#161616' : '#ffffff';
  const [red, green, blue] = [1, 3, 5].map((at) => parseInt(shade.slice(at, at + 2), 16) / 255);
  return 0.3 * red + 0.59 * green + 0.11 * blue > 0.5 ? '#161616' : '#ffffff';
}

const count = (value) => Math.round(value).toLocaleString('en');

function seconds(value) {
  if (value >= 1) return `${value.toFixed(2)} s`;
  return value >= 1e-3 ? `${(value * 1e3).toFixed(1)} ms` : `${(value * 1e6).toFixed(1)} µs`;
}

function gib(value) {
  if (value >= 100) return `${count(value)} GiB`;
  return value >= 0.1 ? `${value.toFixed(1)} GiB` : `${(value * 1024).toFixed(1)} MiB`;
}

// For axes: '5 s', not '5.00 s'
const trimmed = (text) => text.replace(/\.0+(?= )/, '').replace(/(\.\d*?)0+(?= )/, '$1').replace(/^0 .*/, '0');

const percent = (value) => `${(100 * value).toFixed(1)}%`;

// Round values inside [low, high], about `wanted` of them
function ticks(low, high, wanted) {
  const rough = (high - low) / wanted;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * unit).find((candidate) => candidate >= rough);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high * (1 + 1e-9); value += step) found.push(value);
  return found;
}

function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1) {
    for (const factor of [1, 2, 5]) {
      const value = factor * 10 ** power;
      if (value >= low * (1 - 1e-9) && value <= high * (1 + 1e-9)) found.push(value);
    }
  }
  return found.length >= 4 ? found : ticks(low, high, 5);
}

function powersOfTwo(low, high) {
  const found = [];
  for (let power = Math.ceil(Math.log2(low)); 2 ** power <= high; power += 1) found.push(2 ** power);
  return found;
}

const tip = {
  box: byId('tip'),
  show(x, y, title, ...lines) {
    this.box.replaceChildren(el('b', {}, title), ...lines.filter(Boolean).map((line) => el('div', {}, line)));
    this.box.hidden = false;
    const { offsetWidth: width, offsetHeight: height } = this.box;
    const left = x + 16 + width > innerWidth ? Math.max(8, x - width - 14) : x + 16;
    const top = y + 16 + height > innerHeight ? Math.max(8, y - height - 12) : y + 16;
    this.box.style.transform = `translate(${left}px, ${top}px)`;
  },
  hide() { this.box.hidden = true; },
};

// A canvas of this size in CSS pixels, sharp on any screen
function sized(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext('2d');
  context.scale(ratio, ratio);
  context.font = `12px ${getComputedStyle(document.body).fontFamily}`;
  context.textBaseline = 'middle';
  return context;
}

// Draw now, and again when the width, the colour scheme or the medium changes
function keepDrawn(host, draw) {
  let width = 0;
  new ResizeObserver(() => {
    if (host.clientWidth === width) return;
    width = host.clientWidth;
    draw();
  }).observe(host);
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', draw);
  addEventListener('beforeprint', () => { document.documentElement.dataset.print = ''; draw(); });
  addEventListener('afterprint', () => { delete document.documentElement.dataset.print; draw(); });
}
