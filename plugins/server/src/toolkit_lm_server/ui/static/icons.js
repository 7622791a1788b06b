// Icons: shapes of 16 by 16 pixels, drawn as strokes in the colour of the text.

const SHAPES = {
  attach: "M8 3v10M3 8h10",
  auto: "M8 2a6 6 0 1 0 0 12a6 6 0 1 0 0-12M8 2v12",
  close: "M4 4l8 8M12 4l-8 8",
  copy: "M6 6h7v7H6zM10 3H3v7",
  dark: "M13 9.5A5.5 5.5 0 0 1 6.5 3a5.5 5.5 0 1 0 6.5 6.5z",
  edit: "M3 13l.6-2.8L10.8 3l2.2 2.2-7.2 7.2zM9.5 4.3l2.2 2.2",
  export: "M8 10V2.5M5 5l3-3 3 3M3 9v4.5h10V9",
  file: "M4 2h5l3 3v9H4zM9 2v3h3",
  import: "M8 2.5V10M5 7.5l3 3 3-3M3 9v4.5h10V9",
  left: "M10 3L5 8l5 5",
  light: "M8 5a3 3 0 1 0 0 6a3 3 0 1 0 0-6M8 1.5V3M8 13v1.5M1.5 8H3M13 8h1.5M3.4 3.4l1 1"
    + "M11.6 11.6l1 1M3.4 12.6l1-1M11.6 4.4l1-1",
  list: "M2.5 4h11M2.5 8h11M2.5 12h11",
  more: "M2.5 8h10M9 4.5L12.5 8 9 11.5",
  new: "M8 3v10M3 8h10",
  remove: "M3 4.5h10M6.5 4.5V3h3v1.5M4.5 4.5l.5 9h6l.5-9",
  retry: "M13 8a5 5 0 1 1-1.5-3.6M13 2.5v3h-3",
  right: "M6 3l5 5-5 5",
  sound: "M3 6v4h2.5L9 13V3L5.5 6zM11.5 5.5a3.5 3.5 0 0 1 0 5",
};
const SPACE = "http://www.w3.org/2000/svg";

/** An icon, hidden from screen readers: what holds it has a label. */
export function icon(name) {
  const drawing = document.createElementNS(SPACE, "svg");
  drawing.setAttribute("class", "icon");
  drawing.setAttribute("viewBox", "0 0 16 16");
  drawing.setAttribute("aria-hidden", "true");
  const shape = document.createElementNS(SPACE, "path");
  shape.setAttribute("d", SHAPES[name]);
  drawing.append(shape);
  return drawing;
}
