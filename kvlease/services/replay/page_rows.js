// What is shown and where: the window of time, the rows under each other, and the filters.

const GUTTER = 124, AXIS = 24, STRIP = 46, MINIMAP = 44, PAD = 8;
const PAGE_STATES = ["held", "sealed", "evicted", "quarantined", "free"];

class Filters {
  constructor(log) {
    this.log = log;
    this.set({ request: "", layer: "", page: "" });
  }

  /** Take the texts of the three fields. Returns what is wrong with them, by field. */
  set({ request, layer, page }) {
    const wrong = {};
    const numbers = request.split(/[\s,;]+/).filter(Boolean).map(Number);
    if (numbers.some((n) => !Number.isInteger(n) || n < 0)) wrong.request = "give request numbers";
    this.requests = numbers.length && !wrong.request ? new Set(numbers) : null;
    this.layer = null;
    if (layer.trim()) {
      if (/^\d+$/.test(layer.trim())) this.layer = Number(layer); else wrong.layer = "give one layer";
    }
    this.page = null;
    const match = /^\s*(?:(device|host|storage)\s*:?\s*)?(\d+)\s*$/i.exec(page);
    if (match) this.page = this.log.historyOf(Number(match[2]), (match[1] ?? "device").toLowerCase());
    else if (page.trim()) wrong.page = "give a page, such as 37 or host 37";
    this.#masks();
    return wrong;
  }

  get any() { return this.requests !== null || this.layer !== null || this.page !== null; }

  /** Who passes: requests, batches and transfers. */
  #masks() {
    const { log } = this;
    let passes = this.requests;
    this.transferIds = null;
    if (this.page) {
      const own = new Set();
      this.transferIds = new Set();
      for (const { lease } of this.page.holders) {
        if (log.leases.request[lease]) own.add(log.leases.request[lease]);
        if (log.leases.transfer[lease]) this.transferIds.add(log.leases.transfer[lease]);
      }
      passes = passes ? new Set([...passes].filter((request) => own.has(request))) : own;
    }
    this.passing = passes;
    this.batchPasses = null;
    if (!passes) return;
    this.batchPasses = new Uint8Array(log.batches.length);
    for (let b = 0; b < log.batches.length; b++) {
      this.batchPasses[b] = log.members_of(b).some((request) => passes.has(request)) ? 1 : 0;
    }
  }

  request(request) { return this.passing === null || this.passing.has(request); }
  step(i) { return this.batchPasses === null || this.batchPasses[this.log.steps.batch[i]] === 1; }
  wait(i) { return this.layer === null || this.log.waits.layer[i] === this.layer; }
  transfer(i) {
    const { transfers } = this.log;
    if (this.layer !== null) {
      const first = transfers.first[i];
      if (this.layer < first || this.layer >= first + transfers.count[i]) return false;
    }
    if (this.transferIds) return this.transferIds.has(transfers.transfer[i]);
    return this.requests === null || this.requests.has(transfers.request[i]);
  }
  line(i) {
    return this.passing === null || this.passing.has(this.log.lines.request[i]);
  }
}

class View {
  constructor(log, filters) {
    Object.assign(this, { log, filters, width: 800, height: 600, scroll: 0, chain: null, selected: null, folded: new Set() });
    this.requestRows = Array.from(log.requests, (request, place) =>
      ({ kind: "request", key: place, place, request, label: `request ${request}` }));
    this.fit();
  }

  fit() {
    const margin = Math.max(this.log.end * 0.01, 0.01);
    this.from = -margin;
    this.to = this.log.end + margin;
  }

  get top() { return AXIS + this.strips.length * STRIP; }
  get bottom() { return this.height - MINIMAP; }
  get plot() { return Math.max(this.width - GUTTER - PAD, 50); }
  get scale() { return this.plot / (this.to - this.from); }
  x(time) { return GUTTER + (time - this.from) * this.scale; }
  timeAt(x) { return this.from + (x - GUTTER) / this.scale; }

  /** Tiers that have pages. */
  get strips() {
    return this.log.bytes.tier.map((name, tier) => ({ name, tier }))
      .filter(({ tier }) => tier > 0 && this.log.ledgerOf[tier].length > 0);
  }

  move(from, to) {
    const least = 0.0005, most = (this.log.end + 1) * 1.5;
    const length = Math.min(Math.max(to - from, least), most);
    const middle = Math.min(Math.max((from + to) / 2, 0), this.log.end);
    this.from = middle - length / 2;
    this.to = middle + length / 2;
  }

  zoom(factor, x = GUTTER + this.plot / 2) {
    const fixed = this.timeAt(x);
    const length = Math.min((this.to - this.from) * factor, (this.log.end + 1) * 1.5);
    const share = (x - GUTTER) / this.plot;
    this.move(fixed - length * share, fixed + length * (1 - share));
  }

  pan(pixels) {
    const time = pixels / this.scale;
    this.move(this.from + time, this.to + time);
  }

  /** Rows in order, each with its place `y` below the first. */
  rows() {
    const { log, filters } = this;
    const rows = [];
    // A folded group is its head alone.
    let isFolded = false, group = null;
    const head = (key, label) => {
      isFolded = this.folded.has(key);
      group = key;
      rows.push({ kind: "head", key, label, h: 24, isFolded });
    };
    const add = (row) => {
      row.group = group;
      if (!isFolded) rows.push(row);
    };
    if (filters.page) this.#pageRows(add, head);
    head("steps", "Steps, and lines by actor");
    for (let kind = 1; kind < log.bytes.step.length; kind++) {
      add({ kind: "steps", key: log.bytes.step[kind], label: `${log.bytes.step[kind]} steps`, h: 24, items: log.stepsOf.of(kind) });
    }
    for (let actor = 1; actor < log.bytes.actor.length; actor++) {
      add({ kind: "actor", key: actor, label: log.bytes.actor[actor], h: 16, items: log.byActor.of(actor) });
    }
    for (const [direction, lanes] of log.transfersOf) {
      // Lanes without a transfer in the window would only take room.
      const shown = lanes.map((items, lane) => ({ items, lane })).filter(({ items }) => this.#isBusy(items));
      head(direction, `Transfers: ${direction}`);
      for (const { items, lane } of shown) {
        add({ kind: "transfers", key: `${direction}${lane}`, direction, h: shown.length > 6 ? 13 : 19, items,
          label: lane === 0 ? direction : "" });
      }
    }
    const shown = this.requestRows.filter(({ place, request }) =>
      log.lastOf[place] >= this.from && log.firstOf[place] <= this.to && filters.request(request));
    const total = log.requests.length;
    head("requests", shown.length === total ? `Requests (${total.toLocaleString("en")})`
      : `Requests (${shown.length.toLocaleString("en")} of ${total.toLocaleString("en")} here)`);
    for (const row of shown) {
      row.h = shown.length > 20 ? 15 : 20;
      add(row);
    }
    let y = 0;
    for (const row of rows) { row.y = y; y += row.h; }
    this.rowsHeight = y + PAD;
    this.scroll = Math.min(Math.max(this.scroll, 0), Math.max(0, this.rowsHeight - (this.bottom - this.top)));
    return rows;
  }

  /** Whether a lane has a transfer in the window that passes the filters. */
  #isBusy(items) {
    const { from, to } = this.log.transfers;
    for (let k = firstAbove(to, items, this.from - 1e-9); k < items.length && from[items[k]] <= this.to; k++) {
      if (!this.filters.any || this.filters.transfer(items[k])) return true;
    }
    return false;
  }

  #pageRows(add, head) {
    const { log, filters: { page } } = this;
    head("page", `Page ${page.page} of the ${page.tier} tier`);
    add({ kind: "page", key: "state", label: "state", h: 20, states: page.states });
    const lanes = [];
    for (const holder of page.holders) {
      const from = log.at(holder.line), to = log.leases.to[holder.lease];
      let lane = lanes.find((own) => own.end <= from);
      if (!lane) lanes.push(lane = { end: 0, items: [] });
      lane.end = to;
      lane.items.push({ ...holder, from, to });
    }
    lanes.slice(0, 40).forEach((lane, k) =>
      add({ kind: "holders", key: `h${k}`, label: k ? "" : "held by", h: 18, holders: lane.items }));
  }
}
