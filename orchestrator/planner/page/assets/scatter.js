// Candidates: memory against step time, on logarithmic axes where the range asks for it.
const RULED_OUT = 2;

function candidateScatter(scatter, families) {
  const host = byId('scatter');
  const points = scatter.points.map(([memory, step, mfu, state, family, layout, why], index) => (
    { memory, step, mfu, state, family, layout, why, index }));
  const best = Math.min(...points.filter((one) => one.state).map((one) => one.step));
  // What is many times slower or larger would press all that matters into a corner
  const shown = points.filter((one) => one.step <= 6 * best && one.memory <= 5 * scatter.limit_gib);
  let place = null;
  let current = null;

  function scale(values, from, to, binary = false) {
    const [low, high] = [Math.min(...values), Math.max(...values)];
    const logarithmic = high / low > 3;
    const pad = logarithmic ? Math.log(high / low) * 0.05 : (high - low) * 0.08 || high * 0.1;
    const [start, end] = logarithmic ? [low / Math.exp(pad), high * Math.exp(pad)]
      : [Math.max(0, low - pad), high + pad];
    const position = logarithmic
      ? (value) => from + (to - from) * Math.log(value / start) / Math.log(end / start)
      : (value) => from + (to - from) * (value - start) / (end - start);
    if (!logarithmic) return { position, ticks: ticks(start, end, 5) };
    return { position, ticks: binary ? powersOfTwo(start, end) : logTicks(start, end) };
  }

  function draw() {
    const width = host.clientWidth;
    const height = width < 500 ? 340 : 580;
    const margin = { left: 58, right: 16, top: 26, bottom: 40 };
    // A limit far beyond everything is named, not drawn
    const far = scatter.limit_gib > 4 * Math.max(...shown.map((one) => one.memory));
    const sizes = shown.map((one) => one.memory).concat(far ? [] : [scatter.limit_gib]);
    const x = scale(sizes, margin.left, width - margin.right, true);
    const y = scale(shown.map((one) => one.step), height - margin.bottom, margin.top);
    place = (one) => [x.position(one.memory), y.position(one.step)];
    const picture = svg('svg', { width, height, viewBox: `0 0 ${width} ${height}`, 'aria-hidden': 'true' });
    drawAxes(picture, x, y, width, height, margin, far);
    drawFront(picture);
    for (const one of [...shown].sort((a, b) => a.state - b.state)) picture.append(dot(one));
    if (scatter.winner !== null) drawWinner(picture, points[scatter.winner], width);
    picture.append(svg('circle', { id: 'scatter-cursor', r: 9, fill: 'none', stroke: 'var(--ink)', 'stroke-width': 2,
      visibility: 'hidden' }));
    host.replaceChildren(picture);
  }

  function drawAxes(picture, x, y, width, height, margin, far) {
    for (const value of y.ticks) {
      const at = y.position(value);
      picture.append(svg('line', { class: 'rule', x1: margin.left, x2: width - margin.right, y1: at, y2: at }),
        label(margin.left - 8, at + 4, trimmed(seconds(value)), { anchor: 'end' }));
    }
    let free = -Infinity;
    for (const value of x.ticks) {
      const at = x.position(value);
      if (at - free < 56) continue;
      free = at;
      picture.append(label(at, height - margin.bottom + 18, trimmed(gib(value)), { anchor: 'middle' }));
    }
    picture.append(label(margin.left, 12, 'step time'),
      label(width - margin.right, height - 4, 'memory of the heaviest rank', { anchor: 'end' }));
    if (far) {
      const text = `limit ${gib(scatter.limit_gib)} →`;
      picture.append(label(width - margin.right, 12, text, { anchor: 'end', strong: true }));
      return;
    }
    const limit = x.position(scatter.limit_gib);
    const narrow = limit - margin.left < 170 && width - limit > 110; // no room beside the axis' own name
    const line = { class: 'limit-line', x1: limit, x2: limit, y1: margin.top - 6, y2: height - margin.bottom };
    picture.append(svg('line', line), label(narrow ? limit + 6 : limit - 6, 12, `limit ${gib(scatter.limit_gib)}`,
      { anchor: narrow ? 'start' : 'end', strong: true }));
  }

  function drawFront(picture) {
    const front = scatter.front.map((index) => points[index]).filter((one) => shown.includes(one)).map(place);
    if (front.length < 2) return;
    const path = front.map(([px, py], i) => (i ? `H${px}V${py}` : `M${px} ${py}`)).join('');
    picture.append(svg('path', { d: path, fill: 'none', stroke: 'var(--soft)', 'stroke-width': 1.5 }));
  }

  function dot(one) {
    const [cx, cy] = place(one);
    const shade = families[one.family].colour;
    if (one.state === RULED_OUT) {
      return svg('path', { d: `M${cx} ${cy - 5.5}l5.5 5.5l-5.5 5.5l-5.5 -5.5z`, fill: 'var(--card)', stroke: shade,
        'stroke-width': 2 });
    }
    return one.state ? svg('circle', { cx, cy, r: 4.2, fill: shade, 'fill-opacity': 0.8 })
      : svg('circle', { cx, cy, r: 3.4, fill: 'none', stroke: shade, 'stroke-opacity': 0.6, 'stroke-width': 1.3 });
  }

  function drawWinner(picture, one, width) {
    const [cx, cy] = place(one);
    const left = cx > width / 2;
    const look = { fill: families[one.family].colour, stroke: 'var(--ink)', 'stroke-width': 2.5 };
    picture.append(svg('circle', { cx, cy, r: 7.5, ...look }),
      label(left ? cx - 14 : cx + 14, cy + 18, 'the plan', { anchor: left ? 'end' : 'start', strong: true }));
  }

  function select(one, x, y) {
    current = one;
    const cursor = byId('scatter-cursor');
    cursor.setAttribute('visibility', one ? 'visible' : 'hidden');
    if (!one) return tip.hide();
    const [cx, cy] = place(one);
    cursor.setAttribute('cx', cx);
    cursor.setAttribute('cy', cy);
    return tip.show(x, y, one.layout, `${seconds(one.step)} · ${gib(one.memory)} · MFU ${percent(one.mfu)}`, one.why);
  }

  function nearest(event) {
    const box = host.getBoundingClientRect();
    const [px, py] = [event.clientX - box.left, event.clientY - box.top];
    let found = null;
    let closest = 28 ** 2;
    for (const one of shown) {
      const [cx, cy] = place(one);
      const distance = (cx - px) ** 2 + (cy - py) ** 2;
      if (distance < closest) [found, closest] = [one, distance];
    }
    return found;
  }

  function walk(event) {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === 'Escape') select(null);
    if (step === undefined) return;
    event.preventDefault();
    const now = current ? shown.indexOf(current) : shown.findIndex((one) => one.index === scatter.winner) - step;
    const one = shown[Math.min(shown.length - 1, Math.max(0, now + step))];
    const box = host.getBoundingClientRect();
    const [cx, cy] = place(one);
    select(one, box.left + cx, box.top + cy);
    byId('scatter-say').textContent = `${one.layout}: ${seconds(one.step)}, ${gib(one.memory)}; ${one.why}`;
  }

  const used = families.filter((_, index) => shown.some((one) => one.family === index));
  const beyond = points.length - shown.length;
  byId('scatter-key').replaceChildren(
    ...used.map((family) => keyItem(family.colour, family.name, family.means)),
    ...(shown.some((one) => !one.state) ? [keyItem('ring', 'does not fit')] : []),
    ...(shown.some((one) => one.state === RULED_OUT)
      ? [keyItem('diamond', 'fits and is faster, but is not what was asked for')] : []),
    ...(beyond ? [el('li', {}, el('span', {}, `${count(beyond)} much slower or larger ones are off the chart`))] : []));
  host.addEventListener('pointermove', (event) => select(nearest(event), event.clientX, event.clientY));
  host.addEventListener('pointerdown', (event) => select(nearest(event), event.clientX, event.clientY));
  host.addEventListener('pointerleave', () => select(null));
  host.addEventListener('blur', () => select(null));
  host.addEventListener('keydown', walk);
  keepDrawn(host, draw);
}
