// Words: what a thing is when pointed at, and the findings beside the picture. All text goes in as text.

function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

function count(number, one, many = `${one}s`) {
  return `${number.toLocaleString("en")} ${number === 1 ? one : many}`;
}

function listed(numbers, most = 12) {
  const some = Array.from(numbers.slice(0, most)).join(", ");
  return numbers.length > most ? `${some} and ${numbers.length - most} more` : some;
}

/** What one span is: a title, facts as label and value, and its lines. */
function describe(log, table, i) {
  const own = log[table];
  if (table === "lines") {
    const of = ["request", "lease", "transfer", "step"].filter((name) => own[name][i]).map((name) => [name, own[name][i]]);
    return { title: log.bytes.kind[own.kind[i]], lines: [i + 1],
      facts: [["at", duration(log.time[i])], ["actor", log.bytes.actor[own.actor[i]]], ...of] };
  }
  const lasted = duration(own.ended_at ? own.ended_at[i] - own.from[i] : own.to[i] - own.from[i]);
  const lines = [own.begin?.[i], own.end?.[i]].filter(Boolean);
  const facts = [["at", duration(own.from?.[i] ?? 0)], ["lasted", lasted]];
  const add = (label, value) => { if (value !== "" && value !== 0 && value !== undefined) facts.push([label, value]); };
  if (table === "steps") {
    const kind = log.bytes.step[own.kind[i]];
    facts[0][0] = "began after";
    facts[1][0] = "at most";
    add("requests", listed(log.members_of(own.batch[i])));
    add("rows written", own.rows[i].toLocaleString("en"));
    add("tokens published", own.published[i].toLocaleString("en"));
    add("reason", log.names[own.reason[i]]);
    return { title: `step ${own.step[i]}, ${kind}`, facts, lines: [lines[0], own.read[i], lines[1]].filter(Boolean) };
  }
  if (table === "transfers") {
    const tiers = `${log.bytes.tier[own.source[i]]} to ${log.bytes.tier[own.destination[i]]}`;
    add("ended", log.bytes.ended[own.ended[i]] + (own.reason[i] ? `: ${log.names[own.reason[i]]}` : ""));
    add("moves", `${bytesText(own.nbytes[i])}, ${count(own.pages[i], "page")}, ${count(own.tails[i], "tail")}`);
    add("from, to", tiers);
    add("layers", own.count[i] === 1 ? String(own.first[i]) : `${own.first[i]} to ${own.first[i] + own.count[i] - 1}`);
    add("components", log.names[own.components[i]]);
    add("request", own.request[i]);
    add("deadline of", log.names[own.owner[i]]);
    const [from, to] = log.marks_of(i);
    const marks = Array.from(log.marks.line.subarray(from, to));
    return { title: `${log.bytes.direction[own.direction[i]]} ${own.transfer[i]}`, facts,
      lines: [...new Set([lines[0], ...marks, lines[1], own.settled[i]])] };
  }
  if (table === "phases") {
    add("then", log.names[own.ended[i]]);
    return { title: `request ${own.request[i]}, ${log.bytes.phase[own.phase[i]]}`, facts, lines };
  }
  if (table === "waits") {
    facts[1] = ["stood still", own.us[i] === UNTOLD ? (own.open[i] ? "until the log ends" : "no time that the log tells of") : duration(own.us[i] / 1e3)];
    add("for", `layer ${own.layer[i]} of transfer ${own.transfer[i]}`);
    add("components", log.names[own.components[i]]);
    add("requests", listed(log.members_of(own.batch[i])));
    add("step", own.step[i]);
    add("deadline of", log.names[own.owner[i]]);
    return { title: `wait for layer ${own.layer[i]}`, facts, lines };
  }
  const [from, to] = log.runs_of(i);
  const pages = log.runs.count.subarray(from, to).reduce((sum, n) => sum + n, 0);
  add("holds", `${count(pages, "page")} of the ${log.bytes.tier[own.tier[i]]} tier`);
  add("request", own.request[i]);
  add("transfer", own.transfer[i]);
  if (own.open[i]) add("closed", "not before the log ends");
  return { title: `lease ${own.lease[i]}, ${log.bytes.mode[own.mode[i]]}`, facts, lines };
}

function tipText({ title, facts, lines }, more) {
  const body = facts.map(([label, value]) => `${label}: ${value}`);
  const where = lines.length === 1 ? `line ${lines[0]}` : `lines ${listed(lines, 6)}`;
  return [title, ...body, where, ...(more ? [more] : [])].join("\n");
}

class Panel {
  /** `go` has what links do: line, violation, span, lines. */
  constructor(log, go) {
    Object.assign(this, { log, go });
    this.#head();
    this.#violations();
    this.#doubts();
    this.#stuck();
    this.#slowest();
    this.#stalls();
  }

  #section(id, ...children) {
    const section = document.getElementById(id);
    section.hidden = children.length === 0;
    section.querySelector(".body").replaceChildren(...children);
    return section;
  }

  lineLink(line) {
    return make("button", { type: "button", className: "line-link", textContent: `line ${line}`,
      title: "Show this line in the picture", onclick: () => this.go.line(line) });
  }

  #chainList(lines) {
    const { texts } = this.log.head;
    return make("ol", { className: "chain" }, ...lines.map((line) => {
      const text = texts[line] ?? this.#lineText(line);
      return make("li", {}, this.lineLink(line),
        make("code", { textContent: text.length > 240 ? `${text.slice(0, 240)}…` : text, title: text }));
    }));
  }

  #lineText(line) {
    if (line < 1 || line > this.log.lines.length) return "behind what this page shows";
    const { title, facts } = describe(this.log, "lines", line - 1);
    return `${title} ${facts.map(([label, value]) => `${label} ${value}`).join(", ")}`;
  }

  #head() {
    const { log } = this, { verdict, source, log: head, left_out } = log.head;
    const badge = document.getElementById("verdict");
    const total = Object.values(verdict.violation_counts).reduce((sum, n) => sum + n, 0);
    const looks = { clean: ["clean", "✓ clean"], violations: ["violations", `✕ ${count(total, "violation")}`],
      "cannot tell": ["unsure", "? cannot tell"] };
    const [name, text] = looks[verdict.verdict] ?? ["unsure", verdict.verdict];
    badge.classList.add(name);
    badge.textContent = text;
    document.getElementById("source").textContent = source;
    const outcome = [...log.outcome].map(([ended, n]) => `${n.toLocaleString("en")} ${ended}`).join(", ");
    const facts = [
      `${count(verdict.events, "event")} over ${duration(verdict.span_s * 1000)}`,
      `${count(log.requests.length, "request")}${outcome ? ` (${outcome})` : ""}`,
      count(log.steps.length, "step"),
      `${count(log.transfers.length, "transfer")}${log.failures.length ? ` (${log.failures.length.toLocaleString("en")} not done)` : ""}`,
      count(verdict.stuck.length, "stuck request"),
      ...(verdict.early_reads === null ? [] : [count(verdict.early_reads, "early read")]),
      verdict.is_closed ? "closed in order" : "not closed in order",
    ];
    if (head) facts.push(`level ${head.level}`, `${head.program}, model ${head.model}`);
    if (left_out) facts.push(`the last ${count(left_out, "line")} are not drawn: too many for a page`);
    document.getElementById("facts").textContent = facts.join(" · ");
  }

  #violations() {
    const { verdict } = this.log.head;
    const items = [];
    verdict.violations.forEach((violation, k) => {
      const of = ["request", "layer", "component", "transfer", "step", "lease"]
        .filter((name) => violation[name] !== null && violation[name] !== undefined)
        .map((name) => `${name} ${violation[name]}`).join(", ");
      const button = make("button", { type: "button", className: "item violation", onclick: () => this.go.violation(k) },
        make("b", { textContent: `${violation.rule} ` }), violation.what, make("br"),
        make("span", { className: "quiet", textContent: of }));
      button.dataset.violation = k;
      const chain = this.#chainList(violation.lines);
      chain.hidden = true;
      // Those of one step and transfer say the same of one layer after the other.
      const before = verdict.violations[k - 1];
      const isAlike = before && ["rule", "request", "transfer", "step", "lease"].every((name) =>
        violation[name] === before[name]) && (violation.layer !== null || violation.component !== null);
      if (!isAlike) { items.push(button, chain); return; }
      let more = items[items.length - 1];
      if (more.tagName !== "DETAILS") items.push(more = make("details", {}, make("summary")));
      more.append(button, chain);
      more.firstChild.textContent = `${(more.childElementCount - 1) / 2} more like it, by layer and component`;
    });
    const total = Object.values(verdict.violation_counts).reduce((sum, n) => sum + n, 0);
    if (total > verdict.violations.length) {
      const rules = Object.entries(verdict.violation_counts).map(([rule, n]) => `${rule}: ${n}`).join(", ");
      items.unshift(make("p", { className: "quiet", textContent:
        `The first ${verdict.violations.length} of ${total.toLocaleString("en")} (${rules}).` }));
    }
    if (!items.length) items.push(make("p", { className: "quiet", textContent: "None was found." }));
    const section = this.#section("violations", ...items);
    section.querySelector("h2").textContent = `Violations (${total.toLocaleString("en")})`;
  }

  #doubts() {
    this.#section("doubts", ...this.log.head.verdict.cannot_tell.map((doubt) =>
      make("p", {}, make("b", { textContent: doubt.rules.join(", ") }), ` ${doubt.why} `,
        ...(doubt.line ? [this.lineLink(doubt.line)] : []),
        ...(doubt.times > 1 ? [` and ${doubt.times - 1} more`] : []))));
  }

  #stuck() {
    const { verdict } = this.log.head;
    this.#section("stuck", ...verdict.stuck.map((stuck) => {
      const late = stuck.overdue_s === null ? "" : stuck.overdue_s > 0
        ? `, ${duration(stuck.overdue_s * 1000)} over its deadline`
        : `, ${duration(-stuck.overdue_s * 1000)} before its deadline`;
      return make("div", {},
        make("button", { type: "button", className: "item", onclick: () => this.go.lines(stuck.lines, stuck.request) },
          make("b", { textContent: `request ${stuck.request} ` }),
          `waits for ${stuck.waits_for}${stuck.owner ? `, deadline of ${stuck.owner}` : ""}${late}`),
        this.#chainList(stuck.lines));
    }));
  }

  #slowest() {
    const slow = this.log.head.verdict.slowest_transfers;
    if (!slow.length) return;
    this.#section("slowest", make("table", {},
      make("tr", {}, ...["transfer", "took", "moved", "ended"].map((label) => make("th", { scope: "col", textContent: label }))),
      ...slow.map((one) => make("tr", {},
        make("td", {}, make("button", { type: "button", className: "line-link", textContent: `${one.direction} ${one.transfer}`,
          onclick: () => this.go.span("transfers", this.log.transferAt.get(one.transfer), one.lines) })),
        make("td", { textContent: duration(one.ms) }),
        make("td", { textContent: bytesText(one.nbytes) }),
        make("td", { textContent: one.ended })))));
  }

  #stalls() {
    const { stalls } = this.log.head.verdict;
    if (!stalls.length) return;
    this.#section("stalls", make("table", {},
      make("tr", {}, ...["layer", "from", "waits", "in all", "longest"].map((label) => make("th", { scope: "col", textContent: label }))),
      ...stalls.map((one) => make("tr", {}, ...[one.layer, one.tier, one.waits.toLocaleString("en"), duration(one.total_ms), duration(one.longest_ms)]
        .map((text) => make("td", { textContent: text }))))));
  }

  /** Show what is selected, or that nothing is. */
  select(chosen) {
    if (!chosen) { this.#section("selected"); return; }
    const { title, facts, lines } = describe(this.log, chosen.table, chosen.i);
    this.#section("selected", make("b", { textContent: title }),
      make("table", {}, ...facts.map(([label, value]) => make("tr", {},
        make("th", { scope: "row", textContent: label }), make("td", { textContent: value })))),
      this.#chainList(lines.slice(0, 40)));
    this.#panelTop();
  }

  /** Mark one violation as the shown one, and open its chain. */
  mark(place) {
    for (const button of document.querySelectorAll("[data-violation]")) {
      const chosen = Number(button.dataset.violation) === place;
      button.setAttribute("aria-current", chosen);
      button.nextSibling.hidden = !chosen;
      if (!chosen) continue;
      const group = button.closest("details");
      if (group) group.open = true;
      button.nextSibling.scrollIntoView({ block: "nearest" });
      button.scrollIntoView({ block: "nearest" });
    }
  }

  /** Tell a page's life in words: who held it when. */
  page(history) {
    if (!history) { this.#section("page-history"); return; }
    const { log } = this;
    const told = [
      ...history.states.map(({ line, state, epoch }) => ({ line, text: `${PAGE_STATES[state]}, epoch ${epoch}` })),
      ...history.holders.map(({ line, lease }) => ({ line, text:
        `lease ${log.leases.lease[lease]} (${log.bytes.mode[log.leases.mode[lease]]}) of ${log.leases.transfer[lease]
          ? `transfer ${log.leases.transfer[lease]}` : `request ${log.leases.request[lease]}`}, until line ${log.leases.end[lease]}` })),
    ].sort((a, b) => a.line - b.line);
    const section = this.#section("page-history", told.length
      ? make("ol", { className: "chain" }, ...told.slice(0, 200).map(({ line, text }) =>
        make("li", {}, this.lineLink(line), make("span", { textContent: text }))))
      : make("p", { className: "quiet", textContent: "No line names this page." }),
      ...(told.length > 200 ? [make("p", { className: "quiet", textContent: `and ${told.length - 200} more` })] : []));
    section.querySelector("h2").textContent = `Page ${history.page} of the ${history.tier} tier`;
    this.#panelTop();
  }

  #panelTop() { document.getElementById("panel").scrollTop = 0; }
}
