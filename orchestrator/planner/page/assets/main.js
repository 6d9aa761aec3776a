// Every chart finds its own place in the page. One that fails says so and leaves the others alone.
const charts = [
  ['gpus', () => gpuGrid(data.mesh)],
  ['pipeline', () => pipelineTimeline(data.timeline)],
  ['candidates', () => candidateScatter(data.scatter, data.families)],
  ['whatif', () => whatIf(data.what_if, data.families)],
];
for (const [section, chart] of charts) {
  try {
    chart();
  } catch (error) {
    byId(section).append(el('p', { class: 'note error' }, `This chart could not be drawn: ${error}`));
  }
}
for (const bar of document.querySelectorAll('.bar')) {
  bar.addEventListener('pointermove', (event) => {
    const name = event.target.title || event.target.dataset.name;
    if (!name) return;
    event.target.dataset.name = name;
    event.target.removeAttribute('title'); // or the browser's own tooltip would cover ours
    tip.show(event.clientX, event.clientY, name);
  });
  bar.addEventListener('pointerleave', () => tip.hide());
}
document.documentElement.dataset.ready = '';
