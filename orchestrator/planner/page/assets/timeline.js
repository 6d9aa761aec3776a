// The pipeline: one row per rank of the pipeline, one block per pass of a microbatch. Only what is in view is drawn.
function pipelineTimeline(timeline) {
  const canvas = byId('timeline');
  const scroller = byId('timeline-scroll');
  const spacer = byId('timeline-spacer');
  const names = { F: 'forward', B: 'backward', W: 'weight gradients' };
  const colours = { F: 'var(--c1)', B: 'var(--c2)', W: 'var(--c3)' };
  const rows = timeline.rows;
  const chunks = rows.some((row) => row.stage.some((stage) => stage !== row.stage[0]));
  const rankName = (index) => (chunks ? `pp rank ${index}` : `stage ${index}`);
  const margin = { left: 36, right: 58, top: 18, bottom: 24 };
  const rowHeight = Math.max(9, Math.min(30, 480 / rows.length));
  let zoom = 1;
  let view = null;

  function measure() {
    const width = scroller.clientWidth;
    const plot = width - margin.left - margin.right;
    const scale = plot * zoom / timeline.end;
    const height = margin.top + rows.length * rowHeight + margin.bottom;
    return { width, plot, scale, from: scroller.scrollLeft / scale, height };
  }

  function draw() {
    const width = scroller.clientWidth;
    spacer.style.width = `${margin.left + margin.right + (width - margin.left - margin.right) * zoom}px`;
    view = measure();
    spacer.style.height = `${view.height}px`;
    const context = sized(canvas, view.width, view.height);
    const x = (tick) => margin.left + (tick - view.from) * view.scale;
    context.save();
    context.beginPath();
    context.rect(margin.left, 0, view.plot, view.height);
    context.clip();
    rows.forEach((row, index) => drawRow(context, row, margin.top + index * rowHeight, x));
    drawCut(context, x);
    context.restore();
    drawMargins(context, x);
  }

  function drawRow(context, row, y, x) {
    const height = rowHeight - (rowHeight > 14 ? 3 : 1);
    context.fillStyle = colour('var(--faint)');
    context.fillRect(margin.left, y, view.plot, height);
    const palette = Object.fromEntries(Object.entries(colours).map(([kind, name]) => [kind, colour(name)]));
    const inks = Object.fromEntries(Object.entries(palette).map(([kind, shade]) => [kind, inkOn(shade)]));
    context.textAlign = 'center';
    for (let i = 0; i < row.kinds.length; i += 1) {
      const [left, right] = [x(row.start[i]), x(row.end[i])];
      if (right < margin.left || left > margin.left + view.plot) continue;
      const width = right - left;
      context.fillStyle = palette[row.kinds[i]];
      context.globalAlpha = row.stage[i] === row.stage[0] ? 1 : 0.72; // further chunks of the same rank
      context.fillRect(left, y, Math.max(0.5, width - (width > 3 ? 1 : 0)), height);
      context.globalAlpha = 1;
      if (width > 18 && height > 12) {
        context.fillStyle = inks[row.kinds[i]];
        context.fillText(row.microbatch[i], left + width / 2, y + height / 2 + 1);
      }
    }
    context.textAlign = 'start';
  }

  function drawCut(context, x) {
    if (!timeline.cut) return;
    const [left, right] = timeline.cut.map(x);
    context.fillStyle = colour('var(--card)');
    context.globalAlpha = 0.85;
    context.fillRect(left, margin.top, right - left, rows.length * rowHeight);
    context.globalAlpha = 1;
    context.fillStyle = colour('var(--soft)');
    context.textAlign = 'center';
    if (right - left > 12 && right - left <= 150) {
      rows.forEach((row, index) => context.fillText('⋯', (left + right) / 2, margin.top + (index + 0.5) * rowHeight));
    }
    if (right - left > 150) {
      context.fillText('… the same, again and again …', (left + right) / 2, margin.top + rows.length * rowHeight / 2);
    }
    context.textAlign = 'start';
  }

  function drawMargins(context, x) {
    context.fillStyle = colour('var(--soft)');
    context.fillText('idle', view.width - margin.right + 10, 9);
    const every = Math.ceil(12 / rowHeight);
    rows.forEach((row, index) => {
      if (index % every) return;
      const y = margin.top + index * rowHeight + rowHeight / 2 - 1;
      context.fillText(String(index), 4, y);
      context.fillText(percent(row.idle), view.width - margin.right + 10, y);
    });
    const bottom = margin.top + rows.length * rowHeight;
    const span = [view.from, view.from + view.plot / view.scale].map((tick) => tick * timeline.tick_s);
    for (const value of ticks(span[0], span[1], view.plot / 110)) {
      const at = x(value / timeline.tick_s);
      if (at > margin.left + view.plot - 12) continue;
      context.textAlign = at < margin.left + 14 ? 'start' : 'center';
      context.fillText(trimmed(seconds(value)), at, bottom + 13);
      context.fillRect(at, bottom - 2, 1, 4);
    }
    context.textAlign = 'start';
  }

  function hit(event) {
    const box = canvas.getBoundingClientRect();
    const index = Math.floor((event.clientY - box.top - margin.top) / rowHeight);
    const tick = view.from + (event.clientX - box.left - margin.left) / view.scale;
    const row = rows[index];
    if (!row || tick < 0 || tick > timeline.end) return null;
    const at = row.start.findLastIndex((start) => start <= tick);
    const busy = at >= 0 && row.end[at] >= tick;
    return { index, row, at, busy };
  }

  function point(event) {
    const found = hit(event);
    if (!found) return tip.hide();
    const { index, row, at, busy } = found;
    const show = (...lines) => tip.show(event.clientX, event.clientY, ...lines);
    if (!busy) return show(`${rankName(index)} waits`, `idle for ${percent(row.idle)} of the step`);
    const from = row.start[at] * timeline.tick_s;
    const to = row.end[at] * timeline.tick_s;
    const chunk = chunks ? `, stage ${row.stage[at]}` : '';
    return show(`${rankName(index)}${chunk}: ${names[row.kinds[at]]} of microbatch ${row.microbatch[at]}`,
      `${seconds(from)} – ${seconds(to)}, takes ${seconds(to - from)}`);
  }

  function zoomTo(factor) {
    const middle = (scroller.scrollLeft + view.plot / 2) / (view.plot * zoom);
    zoom = Math.min(256, Math.max(1, factor));
    draw();
    scroller.scrollLeft = middle * view.plot * zoom - view.plot / 2;
    draw();
    byId('timeline-say').textContent = zoom === 1 ? '' : `zoomed ${zoom}×; scroll sideways`;
  }

  const kinds = [...new Set(rows.flatMap((row) => [...row.kinds]))];
  byId('timeline-key').replaceChildren(
    ...kinds.map((kind) => keyItem(colours[kind], names[kind])),
    ...(rows.length > 1 ? [keyItem('var(--line)', 'bubble: the stage waits')] : []));
  const idle = rows.map((row) => percent(row.idle)).join(', ');
  canvas.setAttribute('aria-label', `${rows.length} ${chunks ? 'pp ranks' : 'stages'}; idle share of each: ${idle}`);
  byId('zoom-in').addEventListener('click', () => zoomTo(zoom * 2));
  byId('zoom-out').addEventListener('click', () => zoomTo(zoom / 2));
  byId('zoom-fit').addEventListener('click', () => zoomTo(1));
  scroller.addEventListener('scroll', draw);
  canvas.addEventListener('pointermove', point);
  canvas.addEventListener('pointerdown', point);
  canvas.addEventListener('pointerleave', () => tip.hide());
  keepDrawn(scroller, draw);
}
