// What if a patch were hidden or somewhere else: changes of the image, made on a canvas.

const LARGEST = 420;

function createCanvas(changedBy, follow) {
  const canvas = document.getElementById('photo');
  const board = { canvas, image: null, tool: 'mask', cells: [1, 1], patch: null, from: null, at: null, entry: null };

  board.show = (image, entry, size, patch) => {
    const scale = Math.min(LARGEST / Math.max(...size), 16);
    canvas.width = Math.round(size[1] * scale);
    canvas.height = Math.round(size[0] * scale);
    Object.assign(board, { image, entry, size });
    if (String(patch) !== String(board.patch)) setPatch(board, patch, size);
    canvas.hidden = false;
    board.draw();
  };

  board.draw = () => drawBoard(board);
  const cellOf = (event) => {
    const box = canvas.getBoundingClientRect();
    const at = [(event.clientY - box.top) / box.height, (event.clientX - box.left) / box.width];
    return at.map((part, axis) => Math.max(0, Math.min(board.cells[axis] - 1, Math.floor(part * board.cells[axis]))));
  };
  canvas.addEventListener('pointerdown', (event) => {
    board.from = cellOf(event);
    board.at = board.from;
    canvas.setPointerCapture(event.pointerId);
    board.draw();
  });
  canvas.addEventListener('pointermove', (event) => {
    if (board.from) { board.at = cellOf(event); board.draw(); }
  });
  canvas.addEventListener('pointercancel', () => { board.from = null; board.draw(); });
  canvas.addEventListener('pointerup', (event) => {
    const [from, at] = [board.from, cellOf(event)];
    board.from = null;
    if (!from) return;
    if (board.tool === 'follow') {
      follow(at.map((place, axis) => (place + 0.5) / board.cells[axis]));
    } else if (board.tool === 'move') {
      if (String(from) !== String(at)) changedBy([...board.entry.changes, { kind: 'move', box: boxOf(board, from), to: boxOf(board, at).slice(0, 2) }]);
    } else changedBy(masked(board, from, at));
    board.draw();
  });
  return board;
}

// Cells of one patch, or of several where there would be too many to hit.
function setPatch(board, patch, size) {
  board.patch = patch;
  const select = document.getElementById('cell');
  const base = patch || [Math.ceil(size[0] / 8), Math.ceil(size[1] / 8)];
  const sides = [1, 2, 4, 8].filter((times) => times === 1 || base[0] * times <= size[0] / 2);
  select.replaceChildren(...sides.map((times) => make('option', { value: times, text: `${base[1] * times} × ${base[0] * times} px` })));
  const usual = sides.find((times) => size[0] / (base[0] * times) <= 16) || sides[sides.length - 1];
  select.value = usual;
  const set = () => {
    board.cells = size.map((side, axis) => Math.ceil(side / (base[axis] * Number(select.value))));
    board.step = base.map((side, axis) => (side * Number(select.value)) / size[axis]);
    if (board.image) board.draw();
  };
  select.onchange = set;
  set();
}

function boxOf(board, [row, column]) {
  const [tall, wide] = board.step;
  const [top, left] = [row * tall, column * wide];
  return [top, left, Math.min(tall, 1 - top), Math.min(wide, 1 - left)];
}

// A click on a hidden cell shows it again; a drag hides a rectangle of cells.
function masked(board, from, at) {
  const [top, bottom] = [Math.min(from[0], at[0]), Math.max(from[0], at[0])];
  const [left, right] = [Math.min(from[1], at[1]), Math.max(from[1], at[1])];
  const [first, last] = [boxOf(board, [top, left]), boxOf(board, [bottom, right])];
  const box = [first[0], first[1], last[0] + last[2] - first[0], last[1] + last[3] - first[1]];
  const same = (change) => change.kind === 'mask' && change.box.every((side, i) => Math.abs(side - box[i]) < 1e-9);
  const { changes } = board.entry;
  return changes.some(same) ? changes.filter((change) => !same(change)) : [...changes, { kind: 'mask', box }];
}

function drawBoard(board) {
  const { canvas, image, entry } = board;
  const context = canvas.getContext('2d');
  const [high, wide] = [canvas.height, canvas.width];
  const rect = ([top, left, tall, broad]) => [left * wide, top * high, broad * wide, tall * high];
  context.imageSmoothingEnabled = false;
  context.drawImage(image, 0, 0, wide, high);
  context.strokeStyle = 'rgb(128 128 128 / 55%)';
  context.lineWidth = 1;
  context.beginPath();
  for (let row = 1; row < board.cells[0]; row++) { context.moveTo(0, row * board.step[0] * high); context.lineTo(wide, row * board.step[0] * high); }
  for (let column = 1; column < board.cells[1]; column++) { context.moveTo(column * board.step[1] * wide, 0); context.lineTo(column * board.step[1] * wide, high); }
  context.stroke();
  context.lineWidth = 2;
  context.strokeStyle = '#2fd8e6';
  for (const change of entry.changes) context.strokeRect(...rect(change.kind === 'move' ? [...change.to, change.box[2], change.box[3]] : change.box));
  if (entry.follow) {
    context.strokeStyle = '#ffb000';
    context.strokeRect(...rect(boxOf(board, entry.follow.map((part, axis) => Math.floor(part * board.cells[axis])))));
  }
  if (board.from) {
    context.setLineDash([5, 4]);
    context.strokeStyle = '#ffffff';
    context.strokeRect(...rect(boxOf(board, board.from)));
    context.strokeRect(...rect(boxOf(board, board.at)));
    context.setLineDash([]);
  }
}
