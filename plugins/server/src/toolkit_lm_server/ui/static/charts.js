// Drawing on canvases, in the colours of the style sheet.

const TALLEST_MAP = 132;
const FONT = "11px system-ui, 'DejaVu Sans', sans-serif";

/** A canvas that is as sharp as the screen: its context and size in CSS pixels, cleared. */
function prepared(canvas) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  // The attribute is what the page states; later it is the number of pixels.
  const height = (canvas.dataset.height ??= canvas.getAttribute("height")) * 1;
  canvas.style.height = `${height}px`;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = FONT;
  return { context, width, height };
}

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** The next round number whose half is round, too: 1, 2 or 4 times a power of ten. */
function roundUp(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 10].map((step) => step * power).find((step) => step >= value * 0.999);
}

function frame(context, width, height, top, label) {
  context.strokeStyle = colour("line");
  context.fillStyle = colour("faint");
  context.lineWidth = 1;
  for (const part of [0, 0.5, 1]) {
    const y = Math.round(height - 1 - part * (height - 14)) + 0.5;
    context.beginPath();
    context.moveTo(0, y);
    context.lineTo(width, y);
    context.stroke();
    // Half of a small top may round to the same text.
    const doubled = part === 0.5 && label(top / 2) === label(top);
    if (part && !doubled) context.fillText(label(top * part), 0, y - 3);
  }
}

/**
 * Lines over time.
 * `series`: {values, colour, fill}, the newest value last; `slots`: how many fit.
 */
export function lines(canvas, series, slots, label) {
  const { context, width, height } = prepared(canvas);
  const top = roundUp(Math.max(2, ...series.flatMap((one) => one.values)));
  frame(context, width, height, top, label);
  for (const one of series) {
    const n = one.values.length;
    if (n < 2) continue;
    const x = (i) => width - ((n - 1 - i) * width) / (slots - 1);
    const y = (value) => height - 1 - (value / top) * (height - 14);
    context.beginPath();
    one.values.forEach((value, i) =>
      i ? context.lineTo(x(i), y(value)) : context.moveTo(x(i), y(value)),
    );
    context.strokeStyle = colour(one.colour);
    context.lineWidth = 1.6;
    context.lineJoin = "round";
    context.stroke();
    if (!one.fill) continue;
    context.lineTo(x(n - 1), height - 1);
    context.lineTo(x(0), height - 1);
    context.globalAlpha = 0.14;
    context.fillStyle = colour(one.colour);
    context.fill();
    context.globalAlpha = 1;
  }
}

/**
 * Bars side by side, the last at the right: {value, heavy}.
 * A heavy one is drawn in the second colour.
 */
export function bars(canvas, values, slots, label) {
  const { context, width, height } = prepared(canvas);
  // A few slow ones do not flatten the others: they are cut, and marked.
  const sorted = values.map((one) => one.value).sort((a, b) => a - b);
  const usual = sorted[Math.floor(sorted.length * 0.95)] ?? 0;
  const top = roundUp(Math.max(0.1, usual * 1.3));
  frame(context, width, height, top, label);
  const step = width / slots;
  const tones = [colour("used"), colour("second")];
  values.forEach((one, i) => {
    const x = width - (values.length - i) * step;
    const tall = Math.max(1, Math.min(1, one.value / top) * (height - 14));
    context.fillStyle = tones[one.heavy ? 1 : 0];
    context.fillRect(x, height - 1 - tall, Math.max(1, step - 1), tall);
    if (one.value > top) context.fillRect(x, height - 1 - tall - 5, Math.max(1, step - 1), 3);
  });
}

/** How often values fell between bounds. */
export function histogram(canvas, counts, labels) {
  const { context, width, height } = prepared(canvas);
  const floor = height - 14;
  const top = Math.max(1, ...counts);
  const step = width / counts.length;
  context.fillStyle = colour("used");
  counts.forEach((value, i) => {
    if (!value) return;
    const tall = Math.max(2, (value / top) * (floor - 2));
    context.beginPath();
    context.roundRect(i * step + 0.5, floor - tall, Math.max(1, step - 1.5), tall, [2, 2, 0, 0]);
    context.fill();
  });
  context.fillStyle = colour("line-strong");
  context.fillRect(0, floor, width, 1);
  context.fillStyle = colour("faint");
  const [left, right] = labels.map((label) => context.measureText(label).width);
  if (labels[0] !== labels[1] && left + right + 6 < width)
    context.fillText(labels[0], 0, height - 2);
  context.textAlign = "right";
  context.fillText(labels[1], width, height - 2);
  context.textAlign = "left";
}

/**
 * A map of `total` blocks, of which the first are used and the next cached.
 * Returns how many blocks a cell stands for.
 */
export function blocks(canvas, { used, cached, total }) {
  let size = 14;
  const columns = () => Math.max(1, Math.floor((canvas.clientWidth + 2) / size));
  const rows = () => Math.floor((TALLEST_MAP + 2) / size);
  while (size > 8 && columns() * rows() < total) size--;
  const each = Math.max(1, Math.ceil(total / (columns() * rows())));
  const cells = Math.ceil(total / each);
  const across = columns();
  canvas.dataset.height = Math.ceil(cells / across) * size - 2;
  const { context } = prepared(canvas);
  const tones = { used: colour("used"), cached: colour("cached"), free: colour("free") };
  for (let i = 0; i < cells; i++) {
    const x = (i % across) * size;
    const y = Math.floor(i / across) * size;
    const part = (from, to) =>
      Math.max(0, Math.min(to, (i + 1) * each) - Math.max(from, i * each)) / each;
    const mine = size - 2;
    context.fillStyle = tones.free;
    context.beginPath();
    context.roundRect(x, y, mine, mine, 2);
    context.fill();
    let bottom = y + mine;
    for (const [tone, share] of [["used", part(0, used)], ["cached", part(used, used + cached)]]) {
      if (!share) continue;
      const tall = Math.max(2, share * mine);
      context.fillStyle = tones[tone];
      context.beginPath();
      context.roundRect(
        x,
        Math.max(y, bottom - tall),
        mine,
        Math.min(tall, bottom - y),
        share === 1 ? 2 : 1,
      );
      context.fill();
      bottom -= tall;
    }
  }
  return each;
}
