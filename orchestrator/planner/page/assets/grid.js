// Nodes × GPUs, coloured by the coordinate on one mesh axis. Ranks are numbered node-major, so a coordinate is
// (rank ÷ stride) mod degree: 16,384 GPUs need no data of their own.
const GAP = 0.5; // between nodes, in cells

function gpuGrid(mesh) {
  const canvas = byId('grid');
  const perNode = mesh.gpus_per_node;
  const across = perNode <= 4 ? perNode : Math.ceil(perNode / 2);
  const down = Math.ceil(perNode / across);
  const axes = new Map(mesh.axes.map((axis) => [axis.axis, axis]));
  let axis = axes.get(mesh.first) ?? { axis: 'none', degree: 1, stride: 1 };
  let at = null; // the rank pointed at
  let shape = null;

  const coordinate = (rank, of) => Math.floor(rank / of.stride) % of.degree;
  const members = (rank) => {
    const first = rank - coordinate(rank, axis) * axis.stride;
    return Array.from({ length: axis.degree }, (_, index) => first + index * axis.stride);
  };

  // As many columns as make the cells largest, within the height; whole rows and a filled
  // width are worth some of the size
  function fit(width) {
    const limit = width < 600 ? 620 : 430;
    let best = null;
    for (let columns = 1; columns <= mesh.num_nodes; columns += 1) {
      const rows = Math.ceil(mesh.num_nodes / columns);
      const share = across + (columns > 1 ? GAP * (columns - 1) / columns : 0);
      let cell = Math.min(52, width / columns / share);
      const label = cell * across >= 52 ? 18 : 0;
      cell = Math.min(cell, (limit / rows - label) / (down + GAP));
      const filled = Math.min(1, columns * cell * share / width);
      const worth = cell * (mesh.num_nodes % columns ? 0.66 : 1) * (0.6 + 0.4 * filled);
      if (!best || worth > best.worth) best = { worth, cell, label, columns, rows };
    }
    const gap = best.cell * GAP;
    const tile = { width: across * best.cell + gap, height: down * best.cell + best.label + gap };
    return { ...best, tile, width: Math.min(width, best.columns * tile.width), height: best.rows * tile.height };
  }

  function corner(rank) {
    const node = Math.floor(rank / perNode);
    const gpu = rank % perNode;
    return [(node % shape.columns) * shape.tile.width + (gpu % across) * shape.cell,
      Math.floor(node / shape.columns) * shape.tile.height + shape.label + Math.floor(gpu / across) * shape.cell];
  }

  function draw() {
    shape = fit(byId('grid-plot').clientWidth);
    const context = sized(canvas, shape.width, shape.height);
    const colours = Array.from({ length: axis.degree }, (_, index) => indexColour(index, axis.degree));
    const group = at === null || axis.degree === 1 ? null : new Set(members(at));
    const size = shape.cell - (shape.cell > 6 ? 2 : shape.cell > 2.5 ? 0.5 : 0);
    const total = mesh.num_nodes * perNode;
    for (let rank = 0; rank < total; rank += 1) {
      const [x, y] = corner(rank);
      const used = rank < mesh.world_size;
      context.globalAlpha = !used ? 0.5 : group && !group.has(rank) ? 0.28 : 1;
      context.fillStyle = used ? colours[coordinate(rank, axis)] : colour('var(--line)');
      context.fillRect(x, y, size, size);
    }
    context.globalAlpha = 1;
    drawLabels(context, size);
    if (at !== null) {
      const [x, y] = corner(at);
      context.strokeStyle = colour('var(--ink)');
      context.lineWidth = 2;
      context.strokeRect(x - 1, y - 1, size + 2, size + 2);
    }
  }

  function drawLabels(context, size) {
    if (shape.label) {
      context.fillStyle = colour('var(--soft)');
      for (let node = 0; node < mesh.num_nodes; node += 1) {
        const [x, y] = corner(node * perNode);
        context.fillText(`node ${node}`, x, y - 9);
      }
    }
    if (size < 20) return;
    context.textAlign = 'center';
    const inks = Array.from({ length: axis.degree }, (_, index) => inkOn(indexColour(index, axis.degree)));
    for (let rank = 0; rank < mesh.world_size; rank += 1) {
      const [x, y] = corner(rank);
      context.fillStyle = inks[coordinate(rank, axis)];
      context.fillText(coordinate(rank, axis), x + size / 2, y + size / 2 + 1);
    }
    context.textAlign = 'start';
  }

  function describe(rank) {
    const where = `node ${Math.floor(rank / perNode)}, GPU ${rank % perNode}`;
    if (rank >= mesh.world_size) return [where, 'not used by this plan'];
    const inGroup = axis.degree > 1 ? `${axis.axis} group: ${listed(members(rank))}` : '';
    const place = mesh.axes.map((one) => `${one.axis} ${coordinate(rank, one)}`).join(' · ');
    return [`rank ${rank} · ${where}`, place, inGroup];
  }

  function listed(ranks) {
    const shown = ranks.length <= 8 ? ranks.join(', ') : `${ranks.slice(0, 4).join(', ')}, … ${ranks.at(-1)}`;
    return `ranks ${shown}`;
  }

  function hit(event) {
    const box = canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const column = Math.floor(x / shape.tile.width);
    const node = Math.floor(y / shape.tile.height) * shape.columns + column;
    const gpuX = Math.floor((x - column * shape.tile.width) / shape.cell);
    const gpuY = Math.floor(((y % shape.tile.height) - shape.label) / shape.cell);
    const gpu = gpuY * across + gpuX;
    const inside = gpuX >= 0 && gpuX < across && gpuY >= 0 && gpu < perNode && column < shape.columns;
    return inside && node < mesh.num_nodes ? node * perNode + gpu : null;
  }

  function point(rank, x, y) {
    if (rank !== at) {
      at = rank;
      draw();
    }
    if (at === null) tip.hide();
    else tip.show(x, y, ...describe(at));
  }

  function choose(name) {
    axis = axes.get(name);
    byId('axis-note').textContent = `${axis.degree.toLocaleString('en')} ${axis.means}. ${count(axis.groups)} `
      + `${axis.groups === 1 ? 'group' : 'groups'} of ${count(axis.degree)}, `
      + `${axis.groups === 1 ? '' : 'each '}${axis.where}.`;
    const key = byId('grid-key');
    if (axis.degree <= 16) {
      key.replaceChildren(`${axis.axis} `, ...Array.from({ length: axis.degree }, (_, index) => el('span', {},
        el('i', { style: `background:${indexColour(index, axis.degree)}` }), String(index))));
    } else {
      const stops = Array.from({ length: 9 }, (_, index) => indexColour(index / 8 * (axis.degree - 1), axis.degree));
      key.replaceChildren(`${axis.axis} 0`, el('i', { class: 'gradient',
        style: `background:linear-gradient(90deg, ${stops.join(', ')})` }), String(axis.degree - 1));
    }
    canvas.setAttribute('aria-label', `${count(mesh.num_nodes)} nodes of ${perNode} GPUs, coloured by ${axis.axis}`);
    draw();
  }

  function move(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -across, ArrowDown: across, PageUp: -perNode,
      PageDown: perNode, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === 'Escape') point(null);
    if (step === undefined) return;
    event.preventDefault();
    const next = Math.min(mesh.num_nodes * perNode - 1, Math.max(0, (at ?? -Math.sign(step)) + step));
    const box = canvas.getBoundingClientRect();
    const [x, y] = corner(next);
    point(next, box.left + x, box.top + y);
    byId('grid-say').textContent = describe(next).join('; ');
  }

  for (const one of mesh.axes) {
    const input = el('input', { type: 'radio', name: 'axis', value: one.axis });
    input.checked = one.axis === mesh.first;
    input.addEventListener('change', () => choose(one.axis));
    byId('axis').append(el('label', {}, input, `${one.axis} ${count(one.degree)}`));
  }
  if (mesh.axes.length === 0) byId('axis').hidden = true;
  canvas.addEventListener('pointermove', (event) => point(hit(event), event.clientX, event.clientY));
  canvas.addEventListener('pointerdown', (event) => point(hit(event), event.clientX, event.clientY));
  canvas.addEventListener('pointerleave', () => point(null));
  canvas.addEventListener('blur', () => point(null));
  canvas.addEventListener('keydown', move);
  keepDrawn(byId('grid-plot'), () => (mesh.axes.length ? choose(axis.axis) : draw()));
}
