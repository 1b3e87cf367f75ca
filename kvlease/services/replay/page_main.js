// The page itself: boot, input, and the words for when something is wrong.

function complain(reason) {
  const problem = document.getElementById("problem");
  problem.textContent = `This page cannot show its log: ${reason}. Write it again with kvlease replay LOG --html FILE.`;
  problem.hidden = false;
  document.documentElement.dataset.problem = reason;
}

window.addEventListener("error", (event) => complain(event.message));
window.addEventListener("unhandledrejection", (event) => complain(String(event.reason?.message ?? event.reason)));

class Page {
  constructor(log) {
    this.log = log;
    this.filters = new Filters(log);
    this.view = new View(log, this.filters);
    this.canvas = document.getElementById("picture");
    this.painter = new Painter(this.canvas, this.view);
    this.finder = new Finder(this.painter);
    this.panel = new Panel(log, {
      line: (line) => this.showLines([line]),
      lines: (lines, request) => this.showLines(lines, (row) => row.kind === "request" && row.request === request),
      violation: (place) => this.showViolation(place),
      span: (table, i, lines) => this.showSpan(table, i, lines),
    });
    this.shown = -1;
    drawLegend(this.painter);
    this.#fields();
    this.#pointer();
    this.#keys();
    new ResizeObserver(() => this.refresh()).observe(this.canvas.parentElement);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      this.painter.recolour();
      drawLegend(this.painter);
      this.refresh();
    });
    this.painter.draw();
    this.#spanShown();
  }

  refresh() {
    if (this.pending) return;
    this.pending = true;
    requestAnimationFrame(() => {
      this.pending = false;
      this.painter.draw();
      this.#spanShown();
    });
  }

  #spanShown() {
    document.getElementById("span-shown").textContent = `${duration(this.view.to - this.view.from)} shown`;
  }

  say(text) { document.getElementById("say").textContent = text; }

  // Going to places.

  /** Bring lines into view, and the first row that `wanted` accepts. */
  showLines(lines, wanted) {
    const times = lines.filter((line) => line >= 1 && line <= this.log.lines.length).map((line) => this.log.at(line));
    if (!times.length) return;
    const from = Math.min(...times), to = Math.max(...times);
    const now = this.view.to - this.view.from;
    const room = from === to ? Math.min(now, Math.max(this.log.end / 40, 0.05)) : (to - from) * 1.7;
    this.view.move((from + to) / 2 - room / 2, (from + to) / 2 + room / 2);
    if (lines.length === 1) {
      this.select({ table: "lines", i: lines[0] - 1, key: `actor ${this.log.lines.actor[lines[0] - 1]}` });
    }
    if (wanted) this.#reveal(wanted);
    this.refresh();
  }

  #reveal(wanted) {
    const row = this.view.rows().find(wanted);
    if (!row) return;
    const room = this.view.bottom - this.view.top;
    this.view.scroll = row.y + row.h <= room ? 0 : row.y - room / 2;
  }

  showViolation(place) {
    const violation = this.log.head.verdict.violations[place];
    if (!violation) return;
    this.shown = place;
    this.view.chain = { violation };
    this.select(null);
    this.panel.mark(place);
    // The row must pass the filters to be seen.
    if (violation.request !== null && !this.filters.request(violation.request)) this.#clear();
    this.showLines(violation.lines, (row) => isConcerned(row, violation, this.log));
    this.select(null);
    this.say(`Violation ${place + 1}: ${violation.rule}, ${violation.what}`);
  }

  showSpan(table, i, lines) {
    if (i === undefined) { this.showLines(lines); return; }
    this.select({ table, i, key: null });
    this.showLines(lines.length > 1 ? lines : [...lines, ...lines]);
    this.view.rows();
    this.#reveal((row) => row.items?.includes(i) && row.kind === table);
  }

  select(chosen) {
    this.view.selected = chosen;
    this.panel.select(chosen);
    if (chosen) this.say(tipText(describe(this.log, chosen.table, chosen.i)));
    this.refresh();
  }

  #tip(x, y) {
    const tip = document.getElementById("tip");
    const hit = this.finder.hit(x, y);
    const text = hit
      ? tipText(describe(this.log, hit.table, hit.i), hit.many > 2 ? `${hit.many} here; zoom in to tell them apart` : "")
      : this.finder.stripText(x, y);
    tip.hidden = !text;
    if (!text) return;
    tip.textContent = text;
    const left = x + 16 + tip.offsetWidth > this.view.width ? x - tip.offsetWidth - 12 : x + 16;
    tip.style.left = `${Math.max(left, 4)}px`;
    tip.style.top = `${Math.max(Math.min(y + 14, this.view.height - tip.offsetHeight - 6), 4)}px`;
  }

  // Input.

  #pointer() {
    const { canvas, view } = this;
    const tip = document.getElementById("tip");
    let drag = null;
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      const size = event.deltaMode === 1 ? 16 : 1;
      if (event.shiftKey) view.scroll += (event.deltaY || event.deltaX) * size;
      else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) view.pan(event.deltaX * size);
      else view.zoom(Math.exp(Math.max(-120, Math.min(event.deltaY * size, 120)) * 0.0022), Math.max(event.offsetX, GUTTER));
      tip.hidden = true;
      this.refresh();
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      drag = { x: event.offsetX, y: event.offsetY, moved: false, map: event.offsetY >= view.bottom };
      if (drag.map) this.#mapTo(event.offsetX);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!drag) { this.#tip(event.offsetX, event.offsetY); return; }
      tip.hidden = true;
      if (drag.map) { this.#mapTo(event.offsetX); return; }
      const dx = event.offsetX - drag.x, dy = event.offsetY - drag.y;
      if (!drag.moved && Math.hypot(dx, dy) < 4) return;
      view.pan(-dx);
      view.scroll -= dy;
      drag = { ...drag, x: event.offsetX, y: event.offsetY, moved: true };
      this.refresh();
    });
    canvas.addEventListener("pointerup", (event) => {
      if (drag && !drag.moved && !drag.map) this.#press(event.offsetX, event.offsetY);
      drag = null;
    });
    canvas.addEventListener("pointercancel", () => { drag = null; });
    canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
    canvas.addEventListener("dblclick", (event) => { view.zoom(0.25, Math.max(event.offsetX, GUTTER)); this.refresh(); });
  }

  /** Fold a group, or select what is there. */
  #press(x, y) {
    const row = this.finder.rowAt(y);
    if (row?.kind !== "head") { this.select(this.finder.hit(x, y)); return; }
    this.#fold(row.key);
  }

  #fold(group) {
    const { folded } = this.view;
    this.lastFolded = group;
    if (!folded.delete(group)) folded.add(group);
    this.refresh();
  }

  /** The group of the selected row, or the one that was folded last. */
  #group() {
    const row = this.view.rows().find((one) => rowKey(one) === this.view.selected?.key);
    return row?.group ?? this.lastFolded ?? "steps";
  }

  #mapTo(x) {
    const half = (this.view.to - this.view.from) / 2;
    const middle = (x - GUTTER) / this.view.plot * this.log.end;
    this.view.move(middle - half, middle + half);
    this.refresh();
  }

  #keys() {
    const { view } = this;
    const total = this.log.head.verdict.violations.length;
    const does = {
      ArrowLeft: () => view.pan(-view.plot / 8), ArrowRight: () => view.pan(view.plot / 8),
      ArrowUp: () => { view.scroll -= 54; }, ArrowDown: () => { view.scroll += 54; },
      PageUp: () => { view.scroll -= view.height / 2; }, PageDown: () => { view.scroll += view.height / 2; },
      "+": () => view.zoom(0.7), "=": () => view.zoom(0.7), "-": () => view.zoom(1 / 0.7),
      0: () => view.fit(), Home: () => view.fit(),
      n: () => total && this.showViolation((this.shown + 1) % total),
      p: () => total && this.showViolation((Math.max(this.shown, 0) + total - 1) % total),
      ".": () => this.#along(1), ",": () => this.#along(-1), "]": () => this.#across(1), "[": () => this.#across(-1),
      f: () => this.#fold(this.#group()),
      "/": () => document.getElementById("by-request").focus(),
      Escape: () => { view.chain = null; this.shown = -1; this.panel.mark(-1); this.select(null); },
    };
    document.addEventListener("keydown", (event) => {
      const inField = event.target instanceof HTMLInputElement;
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (inField) {
        if (event.key === "Escape") { event.target.value = ""; this.#apply(); this.canvas.focus(); }
        return;
      }
      const onCanvas = event.target === this.canvas || event.target === document.body;
      if (!(event.key in does) || (!onCanvas && !"np/".includes(event.key))) return;
      event.preventDefault();
      does[event.key]();
      this.refresh();
    });
    document.getElementById("zoom-in").onclick = () => { view.zoom(0.5); this.refresh(); };
    document.getElementById("zoom-out").onclick = () => { view.zoom(2); this.refresh(); };
    document.getElementById("fit").onclick = () => { view.fit(); this.refresh(); };
  }

  #along(by) {
    const { view, log } = this;
    const rows = view.rows().filter((row) => this.finder.itemsOf(row)[0] && this.finder.itemsOf(row)[1].length);
    const row = rows.find((one) => rowKey(one) === view.selected?.key) ?? rows[0];
    if (!row) return;
    const [table, items] = this.finder.itemsOf(row);
    const starts = table === "lines" ? log.time : log[table].from;
    let place = view.selected && view.selected.table === table ? items.indexOf(view.selected.i) : -1;
    place = place >= 0 ? place + by : items.findIndex((i) => starts[i] >= view.from);
    place = Math.min(Math.max(place, 0), items.length - 1);
    this.#choose(row, table, items[place]);
  }

  #across(by) {
    const { view, log } = this;
    const rows = view.rows().filter((row) => this.finder.itemsOf(row)[0] && this.finder.itemsOf(row)[1].length);
    let place = rows.findIndex((row) => rowKey(row) === view.selected?.key);
    place = place < 0 ? 0 : Math.min(Math.max(place + by, 0), rows.length - 1);
    const row = rows[place];
    if (!row) return;
    const [table, items] = this.finder.itemsOf(row);
    const starts = table === "lines" ? log.time : log[table].from;
    this.#choose(row, table, Array.from(items).find((i) => starts[i] >= view.from) ?? items[items.length - 1]);
  }

  #choose(row, table, i) {
    const { view, log } = this;
    const from = table === "lines" ? log.time[i] : log[table].from[i];
    const to = table === "lines" ? from : log[table].to[i];
    if (to < view.from || from > view.to) {
      const half = (view.to - view.from) / 2;
      view.move((from + to) / 2 - half, (from + to) / 2 + half);
    }
    const room = view.bottom - view.top;
    if (row.y < view.scroll || row.y + row.h > view.scroll + room) view.scroll = row.y - room / 3;
    this.select({ table, i, key: rowKey(row) });
  }

  #fields() {
    let timer = 0;
    for (const name of ["request", "layer", "page"]) {
      document.getElementById(`by-${name}`).addEventListener("input", () => {
        clearTimeout(timer);
        timer = setTimeout(() => this.#apply(), 120);
      });
    }
    document.getElementById("tools").addEventListener("submit", (event) => { event.preventDefault(); this.#apply(); });
    document.getElementById("clear").onclick = () => this.#clear();
  }

  #clear() {
    for (const name of ["request", "layer", "page"]) document.getElementById(`by-${name}`).value = "";
    this.#apply();
  }

  #apply() {
    const texts = {};
    for (const name of ["request", "layer", "page"]) texts[name] = document.getElementById(`by-${name}`).value;
    const wrong = this.filters.set(texts);
    for (const name of ["request", "layer", "page"]) {
      const field = document.getElementById(`by-${name}`);
      field.classList.toggle("wrong", name in wrong);
      field.setAttribute("aria-invalid", name in wrong);
    }
    const { filters, log } = this;
    this.panel.page(filters.page);
    let matches = Object.values(wrong).join("; ");
    if (!matches && filters.any) {
      let transfers = 0;
      for (let i = 0; i < log.transfers.length; i++) transfers += filters.transfer(i) ? 1 : 0;
      matches = `${count(log.requests.filter((request) => filters.request(request)).length, "request")}, ${count(transfers, "transfer")}`;
    }
    document.getElementById("matches").textContent = matches;
    this.view.scroll = 0;
    this.refresh();
  }

}

async function boot() {
  try {
    const data = document.getElementById("data");
    const log = new Log(await unpack(data.textContent));
    data.remove();
    if (!log.lines.length) throw new Error("it has no lines");
    window.page = new Page(log);
    document.documentElement.dataset.drawn = performance.now().toFixed(1);
  } catch (error) {
    complain(error.message);
    document.getElementById("verdict").textContent = "nothing to show";
  }
}

boot();
