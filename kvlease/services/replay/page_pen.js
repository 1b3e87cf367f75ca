// What is drawn with: colours, patterns, labels, and numbers as people read them.

const FONT = "11px system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', sans-serif";
const BOLD = "600 " + FONT;

const COLOURS = ["paper", "card", "ink", "quiet", "line", "grid", "focus", "prefill", "decode", "mixed", "discarded",
  "waiting", "load", "store", "other", "settle", "stall", "violation", "lease", "on-dark", "on-light", "free", "cached",
  "leased", "quarantined", "family-request", "family-page", "family-lease", "family-transfer", "family-step",
  "family-actor", "family-log"];

/** Milliseconds as people read them. */
function duration(ms) {
  const size = Math.abs(ms);
  if (size >= 1000) return `${(ms / 1000).toFixed(size >= 10000 ? 1 : 2)} s`;
  if (size >= 1) return `${ms.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : 2)} ms`;
  return `${(ms * 1000).toFixed(size >= 0.01 ? 0 : 1)} µs`;
}

function bytesText(count) {
  for (const unit of ["B", "KB", "MB", "GB"]) {
    if (count < 1000) return unit === "B" ? `${count} B` : `${count.toFixed(1)} ${unit}`;
    count /= 1000;
  }
  return `${count.toFixed(1)} TB`;
}

/** Colours and small marks, as the style sheet and the system's setting have them. */
class Pen {
  constructor(canvas, view) {
    Object.assign(this, { canvas, view, log: view.log, c: canvas.getContext("2d") });
    this.recolour();
  }

  /** Read the colours of the style sheet, which follow the system's setting. */
  recolour() {
    const style = getComputedStyle(document.documentElement);
    this.colours = Object.fromEntries(COLOURS.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    this.patterns = new Map();
  }

  /** Slanted lines in a colour, so that a state can be told without the colour. */
  hatch(name, back) {
    const key = `${name} ${back}`;
    if (!this.patterns.has(key)) {
      const tile = document.createElement("canvas");
      tile.width = tile.height = 6;
      const c = tile.getContext("2d");
      if (back) { c.fillStyle = this.colours[back]; c.fillRect(0, 0, 6, 6); }
      c.strokeStyle = this.colours[name];
      c.lineWidth = 2;
      for (const shift of [-6, 0, 6]) { c.moveTo(shift, 6); c.lineTo(shift + 6, 0); }
      c.stroke();
      this.patterns.set(key, this.c.createPattern(tile, "repeat"));
    }
    return this.patterns.get(key);
  }

  /** Write the first of some texts that fits a span. */
  _label(texts, x1, x2, y, colour) {
    const { c } = this;
    const left = Math.max(x1, GUTTER) + 4, room = x2 - left - 3;
    if (room < 8) return;
    const text = texts.find((one) => one.length * 5.9 <= room);
    if (!text) return;
    c.fillStyle = colour;
    c.textAlign = "left";
    c.fillText(text, left, y);
  }

  _frame(row, table, i, x1, x2, y, h) {
    const { c, view, colours } = this;
    const chosen = view.selected;
    if (chosen?.table !== table || chosen.i !== i) return;
    c.strokeStyle = colours.focus;
    c.lineWidth = 2.5;
    c.strokeRect(Math.max(x1, GUTTER) - 1, y - 1, Math.max(x2 - Math.max(x1, GUTTER), 2) + 2, h + 2);
    c.lineWidth = 1;
  }

  _cross(x, y, colour) {
    const { c } = this;
    c.strokeStyle = colour;
    c.lineWidth = 2;
    c.beginPath();
    c.moveTo(x - 4, y - 4); c.lineTo(x + 4, y + 4);
    c.moveTo(x - 4, y + 4); c.lineTo(x + 4, y - 4);
    c.stroke();
    c.lineWidth = 1;
  }

  _flag(x, y) {
    const { c } = this;
    c.beginPath();
    c.moveTo(x - 4, y - 2);
    c.lineTo(x + 4, y - 2);
    c.lineTo(x, y + 5);
    c.fill();
    c.fillRect(x - 0.5, y, 1, 30);
  }
}

function axisText(time, step) {
  if (Math.abs(time) < step / 2) return "0";
  if (step >= 1000) return `${+(time / 1000).toFixed(1)} s`;
  if (time >= 1000 && step >= 1) return `${(time / 1000).toFixed(step >= 100 ? 1 : step >= 10 ? 2 : 3)} s`;
  if (step >= 1) return `${+time.toFixed(1)} ms`;
  if (step >= 0.001) return `${time.toFixed(3)} ms`;
  return `${(time * 1000).toFixed(2)} µs`;
}

function rowKey(row) { return `${row.kind} ${row.key}`; }

/** Whether a row is of what a violation names. */
function isConcerned(row, violation, log) {
  if (row.kind === "request") return row.request === (violation.request ?? log.holderOf.get(violation.lease));
  if (row.kind === "transfers" && violation.transfer !== undefined && violation.transfer !== null) {
    const i = log.transferAt.get(violation.transfer);
    return i !== undefined && row.key === `${log.bytes.direction[log.transfers.direction[i]]}${log.transfers.lane[i]}`;
  }
  return false;
}
