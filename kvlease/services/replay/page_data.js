// The log, as the page holds it: tables of columns, times by line, and indexes to draw from.

/** Unpack the data block. Throws an Error whose message says what is wrong with it. */
async function unpack(text) {
  let packed;
  try {
    const letters = atob(text.trim());
    packed = new Uint8Array(letters.length);
    for (let i = 0; i < letters.length; i++) packed[i] = letters.charCodeAt(i);
  } catch {
    throw new Error("it is not complete");
  }
  if (typeof DecompressionStream === "undefined") {
    throw new Error("this browser is too old to unpack it");
  }
  let body;
  try {
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    body = await new Response(stream).arrayBuffer();
  } catch {
    throw new Error("it is cut off or was changed");
  }
  const bytes = new Uint8Array(body);
  if (new TextDecoder().decode(bytes.subarray(0, 8)) !== "kvpage1\n") {
    throw new Error("it is of another version");
  }
  const [size] = new Uint32Array(body, 8, 1);
  const meta = JSON.parse(new TextDecoder().decode(bytes.subarray(16, 16 + size)));
  return { meta, body, start: 16 + size };
}

const ARRAYS = { B: Uint8Array, I: Uint32Array, Q: BigUint64Array };
const UNTOLD = 0xffffffff;

/** Positions 0 .. count-1 sorted by group, and where each group starts: groups are small numbers. */
function grouped(keys, count, groups) {
  const starts = new Uint32Array(groups + 1);
  for (let i = 0; i < count; i++) starts[keys[i] + 1]++;
  for (let g = 0; g < groups; g++) starts[g + 1] += starts[g];
  const next = starts.slice(0, groups);
  const order = new Uint32Array(count);
  for (let i = 0; i < count; i++) order[next[keys[i]]++] = i;
  return { starts, order, of: (g) => order.subarray(starts[g], starts[g + 1]) };
}

/** First place in `order` whose value exceeds `limit`; values grow along the order. */
function firstAbove(values, order, limit, from = 0) {
  let low = from, high = order.length;
  while (low < high) {
    const middle = (low + high) >>> 1;
    if (values[order[middle]] > limit) high = middle; else low = middle + 1;
  }
  return low;
}

class Log {
  constructor({ meta, body, start }) {
    Object.assign(this, { head: meta.head, names: meta.names, bytes: meta.bytes });
    for (const [name, columns] of Object.entries(meta.tables)) {
      const table = { length: 0 };
      for (const [column, [code, offset, length]] of Object.entries(columns)) {
        const values = new ARRAYS[code](body, start + offset, length);
        table[column] = code === "Q" ? Float64Array.from(values, Number) : values;
        table.length = length;
      }
      this[name] = table;
    }
    this.#times();
    this.#requests();
    this.#lanes();
    this.ledgerOf = this.bytes.tier.map((_, tier) =>
      this.#where(this.ledger.length, (i) => this.ledger.tier[i] === tier));
    this.ledgerTimes = this.ledgerOf.map((own) => Float64Array.from(own, (i) => this.at(this.ledger.line[i])));
    this.failures = this.#where(this.transfers.length,
      (i) => !["done", "open"].includes(this.bytes.ended[this.transfers.ended[i]]));
    this.failuresOf = new Map();
    for (const i of this.failures) {
      const key = `${this.bytes.direction[this.transfers.direction[i]]}${this.transfers.lane[i]}`;
      if (!this.failuresOf.has(key)) this.failuresOf.set(key, []);
      this.failuresOf.get(key).push(i);
    }
    this.byActor = grouped(this.lines.actor, this.lines.length, this.bytes.actor.length);
    this.holderOf = new Map();
    for (let i = 0; i < this.leases.length; i++) this.holderOf.set(this.leases.lease[i], this.leases.request[i]);
    this.stepAt = new Map();
    for (let i = 0; i < this.steps.length; i++) this.stepAt.set(this.steps.step[i], i);
    this.transferAt = new Map();
    for (let i = 0; i < this.transfers.length; i++) this.transferAt.set(this.transfers.transfer[i], i);
  }

  /** Time of each line in milliseconds from the first; begin and end of each span likewise. */
  #times() {
    const { low, high, length } = this.lines;
    const time = this.time = new Float64Array(length);
    let ns = 0;
    for (let i = 0; i < length; i++) {
      ns += high[i] * 4294967296 + low[i];
      time[i] = ns / 1e6;
    }
    this.end = length ? time[length - 1] : 0;
    const at = (line) => time[Math.min(Math.max(line, 1), length) - 1] ?? 0;
    this.at = at;
    for (const name of ["steps", "transfers", "phases", "leases", "waits"]) {
      const table = this[name];
      table.from = Float64Array.from(table.begin, at);
      table.to = Float64Array.from(table.settled ?? table.end, at);
      table.ended_at = table.settled ? Float64Array.from(table.end, at) : table.to;
    }
    const { from, to, us, open } = this.waits;
    for (let i = 0; i < us.length; i++) {
      // What ended without a word of how long took no time that the log tells of.
      const told = us[i] === UNTOLD ? (open[i] ? Infinity : 0) : us[i] / 1e3;
      to[i] = Math.min(to[i], from[i] + told);
    }
  }

  #where(length, test) {
    const found = [];
    for (let i = 0; i < length; i++) if (test(i)) found.push(i);
    return Uint32Array.from(found);
  }

  /** Requests in the order of their first phase, each with its phases, leases and waits. */
  #requests() {
    const { phases, leases, waits } = this;
    const places = new Map();
    const byBegin = Uint32Array.from(phases.begin.keys()).sort((a, b) => phases.begin[a] - phases.begin[b]);
    for (const i of byBegin) if (!places.has(phases.request[i])) places.set(phases.request[i], places.size);
    this.places = places;
    this.requests = Uint32Array.from(places.keys());
    const total = places.size;
    const phaseKeys = Uint32Array.from(phases.request, (request) => places.get(request));
    this.phasesOf = grouped(phaseKeys, phases.length, total);
    // Ends of transfers have rows of their own, and requests of no phase have none: the last group.
    const leaseKeys = Uint32Array.from(leases.request, (request, i) =>
      leases.transfer[i] === 0 && places.has(request) ? places.get(request) : total);
    this.leasesOf = grouped(leaseKeys, leases.length, total + 1);
    const waitRows = [], waitKeys = [];
    for (let i = 0; i < waits.length; i++) {
      for (const request of this.members_of(waits.batch[i])) {
        if (places.has(request)) { waitRows.push(i); waitKeys.push(places.get(request)); }
      }
    }
    const byRequest = grouped(waitKeys, waitKeys.length, total);
    this.waitsOf = { of: (place) => Uint32Array.from(byRequest.of(place), (k) => waitRows[k]) };
    this.firstOf = new Float64Array(total);
    this.lastOf = new Float64Array(total);
    this.outcome = new Map();
    for (let place = 0; place < total; place++) {
      const own = this.phasesOf.of(place);
      this.firstOf[place] = phases.from[own[0]];
      const last = own[own.length - 1];
      this.lastOf[place] = phases.to[last];
      const ended = this.names[phases.ended[last]].split(":")[0];
      this.outcome.set(ended, (this.outcome.get(ended) ?? 0) + 1);
    }
  }

  #lanes() {
    const { steps, transfers } = this;
    this.stepsOf = grouped(steps.kind, steps.length, this.bytes.step.length);
    const stride = transfers.lane.reduce((most, lane) => Math.max(most, lane + 1), 1);
    const keys = Uint32Array.from(transfers.lane, (lane, i) => transfers.direction[i] * stride + lane);
    const lanes = grouped(keys, transfers.length, this.bytes.direction.length * stride);
    this.transfersOf = new Map();
    for (let d = 1; d < this.bytes.direction.length; d++) {
      const own = [];
      for (let lane = 0; lane < stride && lanes.of(d * stride + lane).length; lane++) {
        own.push(lanes.of(d * stride + lane));
      }
      this.transfersOf.set(this.bytes.direction[d], own);
    }
  }

  members_of(batch) {
    const start = batch ? this.batches.end[batch - 1] : 0;
    return this.members.request.subarray(start, this.batches.end[batch]);
  }

  marks_of(transfer) {
    const { marks } = this.transfers;
    return [transfer ? marks[transfer - 1] : 0, marks[transfer]];
  }

  runs_of(lease) {
    const { runs } = this.leases;
    return [lease ? runs[lease - 1] : 0, runs[lease]];
  }

  /** Place, among a tier's counts, of the last at or before a time; -1 before the first. */
  ledgerPlace(tier, time) {
    const times = this.ledgerTimes[tier];
    let low = 0, high = times.length;
    while (low < high) {
      const middle = (low + high) >>> 1;
      if (times[middle] <= time) low = middle + 1; else high = middle;
    }
    return low - 1;
  }

  /** What is known of a page of a tier: its states, and the leases that named it, in order. */
  historyOf(page, tierName) {
    const tier = this.bytes.tier.indexOf(tierName);
    const { moves, leases, runs } = this;
    const states = [], holders = [];
    for (let i = 0; tier >= 0 && i < moves.length; i++) {
      if (moves.tier[i] === tier && moves.first[i] <= page && page < moves.first[i] + moves.count[i]) {
        states.push({ line: moves.line[i], state: moves.state[i], epoch: moves.epoch[i] });
      }
    }
    for (let i = 0; tier >= 0 && i < leases.length; i++) {
      if (leases.tier[i] !== tier) continue;
      const [from, to] = this.runs_of(i);
      for (let k = from; k < to; k++) {
        if (runs.first[k] <= page && page < runs.first[k] + runs.count[k]) {
          holders.push({ lease: i, line: runs.line[k], epoch: runs.epoch[k] });
          break;
        }
      }
    }
    holders.sort((a, b) => a.line - b.line);
    return { states, holders, page, tier: tierName };
  }
}
