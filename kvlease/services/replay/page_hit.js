// What is under a point, what is on a row, and samples of both.

class Finder {
  constructor(painter) { Object.assign(this, { painter, view: painter.view, log: painter.log }); }

  get rows() { return this.painter.rows; }

  rowAt(y) {
    if (y < this.view.top || y >= this.view.bottom) return undefined;
    return this.rows.find((row) => y >= row.screen && y < row.screen + row.h);
  }

  /** The span of a row nearest to a point, at most three pixels away, and how many share its pixel. */
  hit(x, y) {
    const row = this.rowAt(y);
    if (!row || x < GUTTER) return null;
    const { log, view } = this;
    const from = view.timeAt(x - 3), to = view.timeAt(x + 3), exact = view.timeAt(x);
    const among = (table, items) => {
      let best = null, many = 0, nearest = Infinity;
      const starts = table === "lines" ? log.time : log[table].from, ends = table === "lines" ? log.time : log[table].to;
      for (let k = firstAbove(ends, items, from - 1e-12); k < items.length && starts[items[k]] <= to; k++) {
        const i = items[k];
        const away = exact < starts[i] ? starts[i] - exact : exact > ends[i] ? exact - ends[i] : 0;
        if (away < nearest) { nearest = away; best = i; }
        if (++many > 5000) break;
      }
      return best === null ? null : { table, i: best, many, key: rowKey(row) };
    };
    // Spans of these may overlap, so each is asked.
    const any = (table, items, test = () => true) => {
      for (let k = items.length - 1; k >= 0; k--) {
        const i = items[k];
        if (test(i) && log[table].from[i] <= to && log[table].to[i] >= from) return { table, i, many: 1, key: rowKey(row) };
      }
      return null;
    };
    switch (row.kind) {
      case "steps": return among("steps", row.items);
      case "transfers": return among("transfers", row.items);
      case "actor": return among("lines", row.items);
      case "holders": return any("leases", row.holders.map(({ lease }) => lease));
      case "request":
        return any("waits", log.waitsOf.of(row.place), (i) => view.filters.wait(i))
          ?? (y > row.screen + row.h - 6 ? any("leases", log.leasesOf.of(row.place)) : null)
          ?? among("phases", log.phasesOf.of(row.place));
      default: return null;
    }
  }

  stripText(x, y) {
    const strip = this.view.strips[Math.floor((y - AXIS) / STRIP)];
    if (!strip || y < AXIS || x < GUTTER) return null;
    const { ledger } = this.log;
    const place = this.log.ledgerPlace(strip.tier, this.view.timeAt(x));
    if (place < 0) return null;
    const i = this.log.ledgerOf[strip.tier][place];
    const [cached, leased, quarantined, total] = [ledger.cached[i], ledger.leased[i], ledger.quarantined[i], ledger.total[i]];
    return `${strip.name} pages at ${duration(this.view.timeAt(x))}\nfree: ${total - cached - leased - quarantined}\ncached: ${cached}\nleased: ${leased}\nquarantined: ${quarantined}\nsince line ${ledger.line[i]}`;
  }

  /** What the keys walk along in a row. */
  itemsOf(row) {
    const { log } = this;
    switch (row.kind) {
      case "request": return ["phases", log.phasesOf.of(row.place)];
      case "actor": return ["lines", row.items];
      case "holders": return ["leases", Uint32Array.from(row.holders, ({ lease }) => lease)];
      case "steps": case "transfers": return [row.kind, row.items];
      default: return [null, []];
    }
  }
}

/** Draw the legend anew, in the present colours. */
function drawLegend(painter) {
  const samples = [
    ["prefill step", (c) => fillBox(c, painter.colours.prefill)], ["decode step", (c) => fillBox(c, painter.colours.decode)],
    ["discarded step", (c) => fillBox(c, painter.hatch("discarded", "paper"))],
    ["waiting", (c) => { c.strokeStyle = painter.colours.waiting; c.strokeRect(1.5, 2.5, 23, 8); }],
    ["stood still for a layer", (c) => { fillBox(c, painter.hatch("stall", "paper")); c.fillStyle = painter.colours.stall; c.fillRect(0, 0, 26, 2); }],
    ["lease held", (c) => { c.fillStyle = painter.colours.lease; c.fillRect(0, 9, 26, 2); }],
    ["load, layers filling it", (c) => legendTransfer(c, painter.colours.load, painter)],
    ["store, until it settles", (c) => legendTransfer(c, painter.colours.store, painter)],
    ["failed, late or revoked", (c) => { c.strokeStyle = painter.colours.stall; c.lineWidth = 2; c.beginPath(); c.moveTo(8, 2); c.lineTo(17, 11); c.moveTo(8, 11); c.lineTo(17, 2); c.stroke(); }],
    ["leased pages", (c) => fillBox(c, painter.colours.leased)], ["cached pages", (c) => fillBox(c, painter.colours.cached)],
    ["quarantined pages", (c) => fillBox(c, painter.hatch("quarantined", "paper"))],
  ];
  document.getElementById("legend").replaceChildren(...samples.map(([text, paint]) => {
    const ratio = window.devicePixelRatio || 1;
    const canvas = make("canvas", { width: 26 * ratio, height: 13 * ratio });
    canvas.style.width = "26px";
    canvas.style.height = "13px";
    const c = canvas.getContext("2d");
    c.scale(ratio, ratio);
    paint(c);
    return make("span", {}, canvas, text);
  }));
}
function fillBox(c, style) { c.fillStyle = style; c.fillRect(0, 0, 26, 13); }

function legendTransfer(c, colour, painter) {
  c.fillStyle = colour;
  c.globalAlpha = 0.45;
  c.fillRect(0, 0, 18, 13);
  c.globalAlpha = 1;
  for (let k = 0; k < 4; k++) c.fillRect(4 + k * 4, 13 - 3.25 * (k + 1), 14 - k * 4, 2.9);
  c.fillStyle = painter.colours.settle;
  c.fillRect(18, 6, 8, 2);
}
