// The whole picture: what stays in place, the rows, and what points at things.

class Painter extends RowPen {
  draw() {
    const { view, canvas, c } = this;
    const ratio = window.devicePixelRatio || 1;
    const box = canvas.parentElement.getBoundingClientRect();
    view.width = box.width;
    view.height = box.height;
    if (canvas.width !== Math.round(box.width * ratio) || canvas.height !== Math.round(box.height * ratio)) {
      canvas.width = Math.round(box.width * ratio);
      canvas.height = Math.round(box.height * ratio);
    }
    c.setTransform(ratio, 0, 0, ratio, 0, 0);
    c.fillStyle = this.colours.paper;
    c.fillRect(0, 0, view.width, view.height);
    c.font = FONT;
    c.textBaseline = "middle";
    const rows = this.rows = view.rows();
    this.#axis();
    view.strips.forEach((strip, k) => this.#strip(strip, AXIS + k * STRIP));
    c.save();
    c.beginPath();
    c.rect(0, view.top, view.width, view.bottom - view.top);
    c.clip();
    const visible = rows.filter((row) => {
      row.screen = view.top + row.y - view.scroll;
      return row.screen < view.bottom && row.screen + row.h > view.top;
    });
    for (const row of visible) this.row(row);
    this.#scrollBar();
    c.restore();
    this.#chain(visible);
    this.#links(visible);
    this.#minimap();
  }

  // Pieces that do not scroll.

  #axis() {
    const { c, view, colours } = this;
    const rough = (view.to - view.from) / Math.max(view.plot / 110, 1);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((n) => n * power).find((size) => size >= rough);
    c.textAlign = "left";
    for (let k = Math.ceil(view.from / step); k * step <= view.to; k++) {
      const x = Math.round(view.x(k * step)) + 0.5;
      if (x < GUTTER) continue;
      c.fillStyle = colours.grid;
      c.fillRect(x, AXIS - 6, 1, view.bottom - AXIS + 6);
      c.fillStyle = colours.quiet;
      c.fillText(axisText(k * step, step), x + 4, AXIS / 2);
    }
    c.fillStyle = colours.quiet;
    c.fillText("time", 10, AXIS / 2);
  }

  #strip({ name, tier }, y) {
    const { c, view, log, colours } = this;
    const { ledger } = log;
    const own = log.ledgerOf[tier], h = STRIP - 10;
    c.fillStyle = colours.ink;
    c.font = BOLD;
    c.textAlign = "left";
    c.fillText(`${name} pages`, 10, y + 12);
    c.font = FONT;
    c.fillStyle = colours.quiet;
    const total = ledger.total[own[own.length - 1]];
    c.fillText(`${total.toLocaleString("en")} in all`, 10, y + 27);
    const left = Math.max(GUTTER, view.x(0)), right = Math.min(view.width - PAD, view.x(log.end));
    if (right <= left) return;
    c.fillStyle = colours.free;
    c.fillRect(left, y + 2, right - left, h);
    const quarantined = this.hatch("quarantined", "paper");
    const stop = Math.ceil(right);
    for (let x = Math.floor(left), next = x; x < stop; x = next) {
      // One box for all pixels that show the same counts.
      const k = log.ledgerPlace(tier, view.timeAt(x + 1));
      const until = k + 1 < own.length ? Math.floor(view.x(log.ledgerTimes[tier][k + 1])) : stop;
      next = Math.min(Math.max(until, x + 1), stop);
      if (k < 0) continue;
      const i = own[k];
      let base = y + 2 + h;
      const layer = (count, colour) => {
        if (!count) return;
        const size = Math.max(count / Math.max(ledger.total[i], 1) * h, 0.7);
        c.fillStyle = colour;
        c.fillRect(x, base - size, next - x, size);
        base -= size;
      };
      layer(ledger.leased[i], colours.leased);
      layer(ledger.cached[i], colours.cached);
      layer(ledger.quarantined[i], quarantined);
    }
    c.strokeStyle = colours.line;
    c.strokeRect(left + 0.5, y + 2.5, right - left - 1, h - 1);
  }

  #scrollBar() {
    const { c, view, colours } = this;
    const room = view.bottom - view.top;
    if (view.rowsHeight <= room) return;
    const size = Math.max(24, room * room / view.rowsHeight);
    const y = view.top + (room - size) * view.scroll / (view.rowsHeight - room);
    c.fillStyle = colours.line;
    c.beginPath();
    c.roundRect(view.width - 7, y, 5, size, 3);
    c.fill();
  }

  #minimap() {
    const { c, view, log, colours } = this;
    const y = view.bottom + 4, h = MINIMAP - 10;
    c.fillStyle = colours.card;
    c.fillRect(0, view.bottom, view.width, MINIMAP);
    c.fillStyle = colours.quiet;
    c.textAlign = "left";
    c.fillText("whole log", 10, y + h / 2);
    this.density ??= this.#density(500);
    const width = view.plot / this.density.length;
    c.fillStyle = colours.waiting;
    this.density.forEach((share, k) => c.fillRect(GUTTER + k * width, y + h - share * h, Math.max(width - 0.4, 0.6), share * h));
    const mapped = (time) => GUTTER + Math.min(Math.max(time / (log.end || 1), 0), 1) * view.plot;
    c.fillStyle = colours.violation;
    for (const violation of log.head.verdict.violations) {
      const line = violation.lines[violation.lines.length - 1];
      if (line) this._flag(mapped(log.at(line)), y);
    }
    c.strokeStyle = colours.focus;
    c.lineWidth = 1.5;
    const left = mapped(view.from), right = mapped(view.to);
    c.strokeRect(left, y - 1, Math.max(right - left, 3), h + 2);
    c.globalAlpha = 0.12;
    c.fillStyle = colours.focus;
    c.fillRect(left, y - 1, Math.max(right - left, 3), h + 2);
    c.globalAlpha = 1;
    c.lineWidth = 1;
  }

  /** How busy the log is over its length, as shares of the busiest stretch. */
  #density(parts) {
    const counts = new Float64Array(parts);
    const { time, end } = this.log;
    for (let i = 0; i < time.length; i++) counts[Math.min(parts - 1, Math.floor(time[i] / (end || 1) * parts))]++;
    const most = Math.max(...counts, 1);
    return Array.from(counts, (count) => count && Math.max(0.06, Math.sqrt(count / most)));
  }

  // What points at other things.

  #chain(visible) {
    const { c, view, log, colours } = this;
    if (!view.chain) return;
    const { violation } = view.chain;
    c.save();
    c.strokeStyle = c.fillStyle = colours.violation;
    c.font = BOLD;
    let taken = -Infinity;
    violation.lines.forEach((line, k) => {
      const x = Math.round(view.x(log.at(line))) + 0.5;
      if (x < GUTTER || x > view.width) return;
      c.setLineDash([4, 3]);
      c.beginPath();
      c.moveTo(x, AXIS);
      c.lineTo(x, view.bottom);
      c.stroke();
      const text = `${k + 1}: line ${line}`;
      const size = c.measureText(text).width + 10;
      const left = Math.max(Math.min(x - 4, view.width - size - PAD), taken + 2);
      taken = left + size;
      if (taken > view.width) return;
      c.beginPath();
      c.roundRect(left, 3, size, 17, 4);
      c.fill();
      c.fillStyle = colours.paper;
      c.textAlign = "left";
      c.fillText(text, left + 5, 12);
      c.fillStyle = colours.violation;
    });
    c.setLineDash([]);
    this.#steps(violation, visible);
    for (const row of visible) {
      if (!isConcerned(row, violation, log)) continue;
      c.lineWidth = 1.5;
      c.strokeRect(GUTTER - 3, row.screen + 0.5, view.width - GUTTER - PAD + 4, row.h - 1);
    }
    c.restore();
  }

  /** Frame the step that a violation names. */
  #steps(violation, visible) {
    const { c, view, log } = this;
    const i = log.stepAt.get(violation.step);
    const row = i !== undefined && visible.find((one) => one.key === log.bytes.step[log.steps.kind[i]]);
    if (!row) return;
    const x1 = Math.max(view.x(log.steps.from[i]), GUTTER), x2 = view.x(log.steps.to[i]);
    c.lineWidth = 2;
    if (x2 > x1) c.strokeRect(x1, row.screen + 1, x2 - x1, row.h - 2);
  }

  /** Curves from the transfers that the selected step read, or to the steps that read it. */
  #links(visible) {
    const { c, view, log, colours } = this;
    const chosen = view.selected;
    if (!chosen || !["steps", "transfers"].includes(chosen.table)) return;
    const { flows, steps, transfers } = log;
    const placeOf = (kind, test) => visible.find((row) => row.kind === kind && test(row));
    c.strokeStyle = colours.focus;
    c.lineWidth = 1.5;
    for (let k = 0; k < flows.length; k++) {
      const transfer = log.transferAt.get(flows.transfer[k]), step = flows.step[k];
      if (transfer === undefined) continue;
      if (chosen.i !== (chosen.table === "steps" ? step : transfer)) continue;
      const a = placeOf("transfers", (row) => row.key === `${log.bytes.direction[transfers.direction[transfer]]}${transfers.lane[transfer]}`);
      const b = placeOf("steps", (row) => row.key === log.bytes.step[steps.kind[step]]);
      if (!a || !b) continue;
      const x1 = view.x(transfers.ended_at[transfer]), x2 = view.x(steps.to[step]);
      const y1 = a.screen + a.h / 2, y2 = b.screen + b.h / 2;
      c.beginPath();
      c.moveTo(x1, y1);
      c.bezierCurveTo(x1 + 40, y1, x2 - 40, y2, x2, y2);
      c.stroke();
      c.beginPath();
      c.arc(x2, y2, 3, 0, 7);
      c.fillStyle = colours.focus;
      c.fill();
    }
    c.lineWidth = 1;
  }
}
