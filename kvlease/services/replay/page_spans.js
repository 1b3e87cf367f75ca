// The rows: only what is visible, and what is narrower than a pixel once a pixel.

class RowPen extends Pen {
  /** Go over the visible ones of a row's spans: `one` draws a span, `many` a pixel full of them. */
  _spans(items, from, to, one, many) {
    const { view } = this;
    let k = firstAbove(to, items, view.from - 1e-9);
    while (k < items.length) {
      const i = items[k];
      if (from[i] > view.to) return;
      const x1 = Math.max(view.x(from[i]), GUTTER - 2), x2 = Math.min(view.x(to[i]), view.width);
      if (x2 - x1 >= 1) {
        one(i, x1, x2);
        k++;
        continue;
      }
      // Only those that end inside the pixel are in it.
      const pixel = Math.floor(x1);
      const next = Math.max(firstAbove(to, items, view.timeAt(pixel + 1), k), k + 1);
      many(i, pixel, next - k);
      k = next;
    }
  }

  row(row) {
    const { c, view, colours } = this;
    const y = row.screen;
    if (row.kind === "head") {
      c.fillStyle = colours.paper;
      c.fillRect(0, y, GUTTER - 1, row.h);
      c.strokeStyle = colours.line;
      c.beginPath();
      c.moveTo(0, y + 3.5);
      c.lineTo(view.width, y + 3.5);
      c.stroke();
      c.fillStyle = colours.ink;
      c.font = BOLD;
      c.textAlign = "left";
      c.fillText(`${row.isFolded ? "▸" : "▾"} ${row.label}`, 10, y + 14);
      c.font = FONT;
      return;
    }
    c.save();
    c.beginPath();
    c.rect(GUTTER, y, view.width - GUTTER - PAD, row.h);
    c.clip();
    this[`_${row.kind}`](row, y + 2, row.h - 4);
    c.restore();
    const chosen = view.selected?.key === rowKey(row);
    c.fillStyle = chosen ? colours.focus : colours.quiet;
    c.font = chosen ? BOLD : FONT;
    c.textAlign = "left";
    c.fillText(row.label, 22, y + row.h / 2 + 0.5, GUTTER - 30);
    c.font = FONT;
  }

  _steps(row, y, h) {
    const { c, view, log, colours } = this;
    const { steps, bytes } = log;
    const name = row.key, dark = name !== "decode";
    const fill = name === "discarded" ? this.hatch("discarded", "paper") : colours[name];
    this._spans(row.items, steps.from, steps.to, (i, x1, x2) => {
      c.globalAlpha = view.filters.step(i) ? 1 : 0.16;
      c.fillStyle = fill;
      c.fillRect(x1, y, Math.max(x2 - x1 - (x2 - x1 > 3 ? 1 : 0), 1), h);
      if (x2 - x1 < 12) { c.globalAlpha = 1; this._frame(row, "steps", i, x1, x2, y, h); return; }
      const size = log.members_of(steps.batch[i]).length;
      this._label([`${steps.step[i]} · ${count(size, "request")}`, `${steps.step[i]} · ${size}`, `${steps.step[i]}`], x1, x2, y + h / 2 + 0.5,
        name === "discarded" ? colours.ink : dark ? colours["on-dark"] : colours["on-light"]);
      c.globalAlpha = 1;
      this._frame(row, "steps", i, x1, x2, y, h);
    }, (i, x) => {
      c.globalAlpha = view.filters.step(i) ? 0.9 : 0.16;
      c.fillStyle = name === "discarded" ? colours.discarded : fill;
      c.fillRect(x, y, 1, h);
      c.globalAlpha = 1;
      this._frame(row, "steps", i, x, x + 1, y, h);
    });
  }

  _actor(row, y, h) {
    const { c, view, log, colours } = this;
    const { items } = row, { time } = log;
    const families = this.families ??= log.bytes.kind.map((kind) => `family-${kind.split(".")[0]}`);
    let k = firstAbove(time, items, view.from - 1e-9);
    while (k < items.length && time[items[k]] <= view.to) {
      const i = items[k], pixel = Math.floor(view.x(time[i]));
      const kind = log.lines.kind[i];
      c.globalAlpha = view.filters.line(i) ? 0.85 : 0.15;
      c.fillStyle = colours[families[kind]] ?? colours.ink;
      c.fillRect(pixel, y, 1.4, h);
      c.globalAlpha = 1;
      if (log.bytes.kind[kind] === "actor.died") this._cross(pixel, y + h / 2, colours.stall);
      k = Math.max(firstAbove(time, items, view.timeAt(pixel + 1), k), k + 1);
    }
  }

  _transfers(row, y, h) {
    const { c, view, log, colours } = this;
    const { transfers, bytes } = log;
    const colour = colours[row.direction] ?? colours.other;
    this._spans(row.items, transfers.from, transfers.to, (i, x1, x2) => {
      const end = Math.max(Math.min(view.x(transfers.ended_at[i]), x2), x1 + 1);
      const passes = view.filters.transfer(i);
      c.globalAlpha = passes ? 1 : 0.16;
      if (x2 - x1 < 4) {
        c.fillStyle = colour;
        c.fillRect(x1, y, end - x1, h);
        c.globalAlpha = 1;
        this._frame(row, "transfers", i, x1, x2, y, h);
        return;
      }
      c.fillStyle = colours.settle;
      c.fillRect(end, y + h / 2 - 1, x2 - end, 2);
      c.fillStyle = colour;
      c.globalAlpha = passes ? 0.45 : 0.12;
      c.fillRect(x1, y, end - x1, h);
      c.globalAlpha = passes ? 1 : 0.16;
      this.#progress(i, x1, end, y, h, colour);
      const ended = bytes.ended[transfers.ended[i]];
      if (ended !== "done") {
        c.strokeStyle = colours.stall;
        c.strokeRect(x1 + 0.5, y + 0.5, end - x1 - 1, h - 1);
      }
      if (h > 10 && end - x1 > 12) this._label([`${transfers.transfer[i]} · ${bytesText(transfers.nbytes[i])}${ended === "done" ? "" : ` · ${ended}`}`, `${transfers.transfer[i]}`],
        x1, end, y + h / 2 + 0.5, colours.ink);
      c.globalAlpha = 1;
      this._frame(row, "transfers", i, x1, x2, y, h);
    }, (i, x) => {
      c.globalAlpha = view.filters.transfer(i) ? 0.9 : 0.16;
      c.fillStyle = colour;
      c.fillRect(x, y, 1.2, h);
      c.globalAlpha = 1;
      this._frame(row, "transfers", i, x, x + 1, y, h);
    });
    // What went wrong is seen however small it is.
    const failures = log.failuresOf.get(row.key) ?? [];
    let last = -Infinity;
    for (let k = firstAbove(transfers.ended_at, failures, view.from); k < failures.length; k++) {
      const i = failures[k], x = view.x(transfers.ended_at[i]);
      if (x > view.width) break;
      if (x < last + 4 || !view.filters.transfer(i)) continue;
      last = x;
      this._cross(x, y + h / 2, colours.stall);
    }
  }

  /** A staircase from the bottom up: how many of the layers are true, and when each became so. */
  #progress(i, x1, end, y, h, colour) {
    const { c, view, log } = this;
    if (end - x1 < 4) return;
    const { marks, transfers, bytes } = log;
    const total = Math.max(transfers.count[i], 1), only = view.filters.layer;
    const [from, to] = log.marks_of(i);
    const seen = new Set();
    c.fillStyle = colour;
    for (let k = from; k < to; k++) {
      const kind = bytes.mark[marks.kind[k]];
      const x = Math.max(view.x(log.at(marks.line[k])), x1);
      if (kind === "done") {
        for (let layer = marks.first[k]; layer < marks.first[k] + marks.count[k] && seen.size <= total; layer++) {
          if (seen.has(layer) || (only !== null && layer !== only)) continue;
          seen.add(layer);
          const size = only !== null ? h : h / total, place = only !== null ? 1 : seen.size;
          if (end > x) c.fillRect(x, y + h - size * place, end - x, Math.max(size - (size > 3 ? 0.5 : 0), 0.5));
        }
      } else {
        // Ticks above: recorded high, landed low.
        c.fillRect(x, kind === "recorded" ? y : y + 3, 1, 3);
      }
    }
  }

  _request(row, y, h) {
    const { c, view, log, colours } = this;
    const { phases, leases, waits, bytes } = log;
    const own = log.phasesOf.of(row.place);
    this._spans(own, phases.from, phases.to, (i, x1, x2) => {
      const phase = bytes.phase[phases.phase[i]];
      if (phase === "waiting") {
        c.strokeStyle = colours.waiting;
        c.strokeRect(x1 + 0.5, y + 0.5, Math.max(x2 - x1 - 1, 1), h - 5);
      } else {
        c.fillStyle = colours[phase];
        c.fillRect(x1, y, x2 - x1, h - 4);
      }
      if (h < 14) { this._frame(row, "phases", i, x1, x2, y, h - 4); return; }
      const colour = phase === "waiting" ? colours.quiet : phase === "prefill" ? colours["on-dark"] : colours["on-light"];
      this._label([phase], x1, x2, y + (h - 4) / 2 + 0.5, colour);
      this._frame(row, "phases", i, x1, x2, y, h - 4);
    }, (i, x) => {
      const phase = bytes.phase[phases.phase[i]];
      c.fillStyle = colours[phase];
      c.fillRect(x, y, 1, h - 4);
    });
    c.fillStyle = colours.lease;
    for (const i of log.leasesOf.of(row.place)) {
      const x1 = Math.max(view.x(leases.from[i]), GUTTER), x2 = view.x(leases.to[i]);
      if (x2 < GUTTER || x1 > view.width) continue;
      c.fillRect(x1, y + h - 2, Math.max(x2 - x1, 1), 2);
      this._frame(row, "leases", i, x1, x2, y + h - 3, 4);
    }
    const stall = this.hatch("stall", "paper");
    let covered = -Infinity;
    for (const i of log.waitsOf.of(row.place)) {
      const x1 = view.x(waits.from[i]), x2 = view.x(waits.to[i]);
      if (x2 < GUTTER || x1 > view.width || !view.filters.wait(i)) continue;
      if (Math.max(x2, x1 + 2) <= covered && view.selected?.table !== "waits") continue;
      covered = Math.max(covered, x1 + 2, x2);
      c.fillStyle = x2 - x1 >= 3 ? stall : colours.stall;
      c.fillRect(x1, y, Math.max(x2 - x1, 2), h - 4);
      c.fillStyle = colours.stall;
      c.fillRect(x1, y - 1, Math.max(x2 - x1, 2), 2);
      this._frame(row, "waits", i, x1, x2, y, h - 4);
    }
    this.#fate(row, own[own.length - 1], y, h);
  }

  /** How a request ended, at its end: a cross if it failed, an arrow if the log stops before. */
  #fate(row, last, y, h) {
    const { view, log, colours, c } = this;
    const ended = log.names[log.phases.ended[last]];
    const x = view.x(log.phases.to[last]);
    if (ended.startsWith("failed")) this._cross(x, y + (h - 4) / 2, colours.stall);
    else if (ended === "open") {
      c.fillStyle = colours.stall;
      c.textAlign = "left";
      c.fillText("▸ open", x + 3, y + (h - 4) / 2);
    }
  }

  _page(row, y, h) {
    const { c, view, log, colours } = this;
    const looks = ["mixed", "cached", "free", this.hatch("quarantined", "paper"), "free"];
    row.states.forEach((move, k) => {
      const x1 = Math.max(view.x(log.at(move.line)), GUTTER);
      const next = row.states[k + 1];
      const x2 = Math.min(view.x(next ? log.at(next.line) : log.end), view.width);
      if (x2 < GUTTER || x1 > view.width) return;
      const look = looks[move.state];
      c.fillStyle = typeof look === "string" ? colours[look] : look;
      c.fillRect(x1, y, Math.max(x2 - x1, 1), h);
      this._label([`${PAGE_STATES[move.state]}, epoch ${move.epoch}`, PAGE_STATES[move.state]], x1, x2, y + h / 2, move.state === 0 ? colours["on-dark"] : colours.ink);
    });
  }

  _holders(row, y, h) {
    const { c, view, log, colours } = this;
    const { leases, bytes } = log;
    for (const { lease, from, to } of row.holders) {
      const x1 = view.x(from), x2 = view.x(to);
      if (x2 < GUTTER || x1 > view.width) continue;
      const exclusive = bytes.mode[leases.mode[lease]] === "exclusive";
      c.fillStyle = exclusive ? colours.store : colours.decode;
      c.fillRect(x1, y, Math.max(x2 - x1 - 1, 1), h);
      const who = leases.transfer[lease] ? `transfer ${leases.transfer[lease]}` : `request ${leases.request[lease]}`;
      this._label([`${who}${exclusive ? ", exclusive" : ""}`, who, String(leases.transfer[lease] || leases.request[lease])], x1, x2, y + h / 2, exclusive ? colours["on-dark"] : colours["on-light"]);
      this._frame(row, "leases", lease, x1, x2, y, h);
    }
  }
}
