// Small multiples: one varied quantity each, MFU of the best layout of every family, a slider to read values.
// MFU, because it stays comparable where the model or the sequence changes.
function whatIf(sweeps, families) {
  byId('whatif-key').replaceChildren(...families.map((family) => keyItem(family.colour, family.name, family.means)));
  const telling = sweeps.filter((one) => one.labels.length > 1);
  byId('sweeps').replaceChildren(...telling.map((one) => sweepCard(one, families)));
}

function sweepCard(sweep, families) {
  const plot = el('div', { class: 'plot' });
  const slider = el('input', { type: 'range', min: 0, max: sweep.labels.length - 1, 'aria-label': sweep.unit });
  slider.value = sweep.now;
  const readout = el('table', {});
  const card = el('div', { class: 'sweep' },
    el('h3', {}, sweep.question), el('p', { class: 'unit' }, `MFU over ${sweep.unit}`),
    el('p', { class: 'cross' }, sweep.crossovers), plot, slider, readout);

  function read() {
    const at = Number(slider.value);
    const best = sweep.best[at] === null ? 'nothing fits' : families[sweep.best[at]].name;
    const planned = at === sweep.now ? ', as planned' : '';
    slider.setAttribute('aria-valuetext', `${sweep.labels[at]}: ${best}`);
    readout.replaceChildren(el('caption', {}, `at ${sweep.labels[at]}${planned}: tokens/s per GPU`),
      el('tbody', {}, ...families.map((family, index) => {
        const entry = sweep.series[index][at];
        const name = el('td', {}, el('i', { style: `background:${family.colour}` }), family.name);
        if (entry.why) return el('tr', { class: 'none' }, name, el('td', {}, '–'), el('td', {}, entry.why));
        return el('tr', { class: index === sweep.best[at] ? 'best' : null }, name,
          el('td', {}, count(entry.tokens_per_s_per_gpu)),
          el('td', {}, `${entry.layout} · ${seconds(entry.step_time_s)}`));
      })));
    draw();
  }

  function draw() {
    const width = plot.clientWidth;
    if (!width) return;
    plot.replaceChildren(sweepPicture(sweep, families, Number(slider.value), width));
  }

  slider.addEventListener('input', read);
  plot.addEventListener('pointerdown', (event) => {
    const box = plot.getBoundingClientRect();
    slider.value = Math.round((event.clientX - box.left - 44) / (box.width - 52) * (sweep.labels.length - 1));
    read();
  });
  keepDrawn(plot, read);
  return card;
}

function sweepPicture(sweep, families, at, width) {
  const height = 190;
  const [left, right, top, bottom] = [44, width - 8, 14, height - 40];
  const last = sweep.labels.length - 1;
  const values = sweep.series.flat().filter((entry) => !entry.why).map((entry) => entry.mfu);
  const most = 1.05 * Math.max(...values, 1e-3);
  const x = (index) => left + (right - left) * index / last;
  const y = (value) => bottom - (bottom - top) * value / most;
  const picture = svg('svg', { width, height, viewBox: `0 0 ${width} ${height}`, 'aria-hidden': 'true' });
  for (const value of ticks(0, most, 3)) {
    picture.append(svg('line', { class: 'rule', x1: left, x2: right, y1: y(value), y2: y(value) }),
      svg('text', { x: left - 8, y: y(value) + 4, 'text-anchor': 'end' }, `${Number((100 * value).toFixed(1))}%`));
  }
  const cursor = { x1: x(at), x2: x(at), y1: top - 6, y2: bottom + 12, stroke: 'var(--ink)', 'stroke-width': 1.5 };
  picture.append(svg('line', cursor));
  sweep.series.forEach((series, index) => drawFamily(picture, series, families[index].colour, x, y));
  const step = (right - left) / last;
  sweep.best.forEach((family, index) => {
    const [from, to] = [Math.max(left, x(index) - step / 2), Math.min(right, x(index) + step / 2)];
    const fill = family === null ? 'var(--faint)' : families[family].colour;
    picture.append(svg('rect', { x: from, y: bottom + 6, width: to - from, height: 7, fill }));
  });
  const every = Math.ceil(last * 54 / (right - left)) || 1;
  sweep.labels.forEach((text, index) => {
    if (index !== at && (index % every || Math.abs(x(index) - x(at)) < 50)) return;
    const anchor = x(index) < left + 20 ? 'start' : x(index) > right - 20 ? 'end' : 'middle';
    picture.append(label(x(index), height - 10, text, { anchor, strong: index === at }));
  });
  return picture;
}

// A line through the values that exist; it breaks where a family is impossible
function drawFamily(picture, series, shade, x, y) {
  let path = '';
  let pen = false;
  series.forEach((entry, index) => {
    if (entry.why) {
      pen = false;
      return;
    }
    const [px, py] = [x(index), y(entry.mfu)];
    path += `${pen ? 'L' : 'M'}${px.toFixed(1)} ${py.toFixed(1)}`;
    pen = true;
    picture.append(svg('circle', { cx: px, cy: py, r: 3, fill: shade }));
  });
  const look = { fill: 'none', stroke: shade, 'stroke-width': 2, 'stroke-linejoin': 'round' };
  if (path) picture.append(svg('path', { d: path, ...look }));
}
