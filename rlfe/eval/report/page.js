"use strict";
const D = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const RUN = Object.fromEntries(D.runs.map((r) => [r.name, r]));
const ARMS = [...new Set(D.runs.map((r) => r.arm))].sort();
const colour = (arm) => arm === undefined ? "var(--base)" : `var(--c${ARMS.indexOf(arm) % 7})`;
const percent = (x) => (100 * x).toFixed(1);
const state = { group: 0, k: 1, step: 0, pair: 0, cell: 0, row: 0, column: 0 };

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}
function draw(tag, attributes = {}, title = "") {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (title) {
    const text = document.createElementNS("http://www.w3.org/2000/svg", "title");
    text.textContent = title;
    node.append(text);
  }
  return node;
}
function ticks(low, high, count) {
  const span = high - low || 1, raw = span / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => span / s <= count);
  const found = [];
  for (let t = Math.ceil(low / step - 1e-9) * step; t <= high + step * 1e-9; t += step) found.push(t);
  return found;
}
const short = (t) => Math.abs(t) < 1e-12 ? "0" : String(+t.toPrecision(3));

/* One frame. lines: {points: [[x, y|null, low, high]], colour, width, dash, dots, title}. */
function chart({ caption, lines, xName, yName, log = false, zero = false, faintFrom = Infinity, yRange }) {
  const W = 420, H = 240, left = 46, right = 10, top = 8, bottom = 34;
  const all = lines.flatMap((l) => l.points);
  const xs = all.map((p) => p[0]), ys = all.flatMap((p) => p.slice(1)).filter((v) => v !== null && v !== undefined && isFinite(v));
  const figure = make("figure", {}, make("figcaption", {}, caption));
  const svg = draw("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": caption });
  figure.append(svg);
  if (!ys.length) { figure.append(make("p", { class: "soft" }, "no values")); return figure; }
  let x0 = Math.min(...xs), x1 = Math.max(...xs), y0 = Math.min(...ys), y1 = Math.max(...ys);
  if (zero) { y0 = Math.min(y0, 0); y1 = Math.max(y1, 0); }
  if (yRange) [y0, y1] = yRange;
  const pad = (y1 - y0) * 0.06 || 0.5; y0 -= pad; y1 += pad;
  if (x0 === x1) { x0 -= log ? x0 / 2 : 1; x1 += 1; }
  const fx = log ? Math.log : (v) => v;
  const X = (v) => left + (W - left - right) * (fx(v) - fx(x0)) / (fx(x1) - fx(x0));
  const Y = (v) => H - bottom - (H - top - bottom) * (v - y0) / (y1 - y0);
  for (const t of ticks(y0, y1, 5)) {
    svg.append(draw("line", { x1: left, x2: W - right, y1: Y(t), y2: Y(t), stroke: "var(--line)", "stroke-width": 0.7 }));
    const label = draw("text", { x: left - 5, y: Y(t) + 4, "text-anchor": "end" }); label.textContent = short(t); svg.append(label);
  }
  const xt = log ? [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000].filter((t) => t >= x0 && t <= x1) : ticks(x0, x1, 6);
  for (const t of xt) { const label = draw("text", { x: X(t), y: H - bottom + 15, "text-anchor": "middle" }); label.textContent = short(t); svg.append(label); }
  const xl = draw("text", { x: (left + W - right) / 2, y: H - 4, "text-anchor": "middle" }); xl.textContent = xName; svg.append(xl);
  const yl = draw("text", { x: 11, y: (H - bottom) / 2, transform: `rotate(-90 11 ${(H - bottom) / 2})`, "text-anchor": "middle" }); yl.textContent = yName; svg.append(yl);
  if (zero) svg.append(draw("line", { x1: left, x2: W - right, y1: Y(0), y2: Y(0), stroke: "var(--soft)", "stroke-width": 1 }));
  for (const line of lines) {
    const runs = [[]];
    for (const p of line.points) if (p[1] === null || p[1] === undefined) runs.push([]); else runs.at(-1).push(p);
    for (const run of runs.filter((r) => r.length)) {
      if (run[0].length > 3 && run[0][2] !== null && run[0][2] !== undefined) {
        const upper = run.map((p) => `${X(p[0])},${Y(p[3])}`), lower = run.map((p) => `${X(p[0])},${Y(p[2])}`).reverse();
        svg.append(draw("polygon", { points: [...upper, ...lower].join(" "), fill: line.colour, opacity: line.dash ? 0.07 : 0.15 }));
      }
      const style = { fill: "none", stroke: line.colour, "stroke-width": line.width || 1.7 };
      if (line.dash) style["stroke-dasharray"] = "5 4";
      const parts = [run.filter((p) => p[0] <= faintFrom), run.filter((p) => p[0] >= faintFrom)];
      parts.forEach((part, i) => {
        if (part.length) svg.append(draw("polyline", { ...style, opacity: i ? 0.4 : 1, points: part.map((p) => `${X(p[0])},${Y(p[1])}`).join(" ") }, line.title));
      });
      if (line.dots) for (const p of run) {
        const tip = `${line.title} ${xName} ${short(p[0])}: ${short(p[1])}` + (p.length > 3 && p[2] != null ? ` [${short(p[2])}, ${short(p[3])}]` : "");
        svg.append(draw("circle", { cx: X(p[0]), cy: Y(p[1]), r: 2.8, fill: line.colour }, p[4] || tip));
      }
    }
  }
  return figure;
}
function table(head, rows) {
  const body = rows.map((row) => make("tr", {}, ...row.map((c) => make("td", typeof c === "string" && c.length > 60 ? { class: "wrap" } : {}, String(c ?? "-")))));
  return make("table", {}, make("thead", {}, make("tr", {}, ...head.map((h) => make("th", {}, h)))), make("tbody", {}, ...body));
}
const group = () => D.groups[state.group];
const pointsOf = (cell) => group().points.filter((p) => p.cell === cell).sort((a, b) => a.step - b.step);
const baseOf = (model) => group().points.find((p) => p.cell === model && p.step === 0);
const at = (p, k) => [100 * p.score[k - 1], p.low ? 100 * p.low[k - 1] : null, p.high ? 100 * p.high[k - 1] : null];
const panels = () => [...new Map(D.runs.map((r) => [`${r.model}|${r.lr}`, r])).values()].sort((a, b) => a.model < b.model ? -1 : a.model > b.model ? 1 : b.lr - a.lr);

function showSteps() {
  const k = state.k, figures = panels().map(({ model, lr, lr_text }) => {
    const runs = D.runs.filter((r) => r.model === model && r.lr === lr && pointsOf(r.name).length);
    const steps = [...new Set(runs.flatMap((r) => pointsOf(r.name).map((p) => p.step)))].sort((a, b) => a - b);
    const lines = runs.map((r) => {
      const found = new Map(pointsOf(r.name).map((p) => [p.step, p])), own = pointsOf(r.name);
      const inside = steps.filter((s) => s >= own[0].step && s <= own.at(-1).step);
      const several = runs.filter((o) => o.arm === r.arm).length > 1;
      return { points: inside.map((s) => found.has(s) ? [s, ...at(found.get(s), k)] : [s, null]), colour: colour(r.arm), dots: true, title: r.name, width: several ? 1 : 1.8 };
    });
    for (const arm of new Set(runs.map((r) => r.arm))) {
      const mean = group().seeds.filter((s) => s.model === model && s.lr === lr && s.arm === arm);
      if (mean.length && k === 1) lines.push({ points: mean.map((s) => [s.step, 100 * s.mean, 100 * s.both_low, 100 * s.both_high]), colour: colour(arm), width: 2.6, title: `${arm}: mean over seeds` });
    }
    const base = baseOf(model);
    if (base) { const ends = steps.length ? [Math.min(0, steps[0]), steps.at(-1)] : [0, 1]; lines.push({ points: ends.map((s) => [s, ...at(base, k)]), colour: "var(--base)", dash: true, title: `${model} (base)` }); }
    return chart({ caption: `${model}, ${lr_text}: ${group().task} pass@${k}`, lines, xName: "step", yName: "%" });
  });
  $("steps").replaceChildren(...figures);
}
function stepList() { return [...new Set(group().points.map((p) => p.step))].filter((s) => s > 0).sort((a, b) => a - b); }
function showCurves() {
  const steps = stepList(), step = steps[Math.min(state.step, steps.length - 1)] ?? 0, n = group().n;
  $("step").max = Math.max(0, steps.length - 1); $("step").value = state.step;
  $("step-text").textContent = String(step); $("step").setAttribute("aria-valuetext", `step ${step}`);
  const figures = panels().map(({ model, lr, lr_text }) => {
    const lines = [];
    for (const r of D.runs.filter((o) => o.model === model && o.lr === lr)) {
      const p = group().points.find((q) => q.cell === r.name && q.step === step);
      if (p) lines.push({ points: p.score.map((_, i) => [i + 1, ...at(p, i + 1)]), colour: colour(r.arm), title: r.name });
    }
    const base = baseOf(model);
    if (base) lines.push({ points: base.score.map((_, i) => [i + 1, ...at(base, i + 1)]), colour: "var(--base)", dash: true, title: `${model} (base)` });
    return chart({ caption: `${model}, ${lr_text}, step ${step}`, lines, xName: "k", yName: "pass@k %", log: true, faintFrom: Math.max(1, n / 2) });
  });
  $("curves").replaceChildren(...figures);
}
function pairs() {
  const arms = group().arms.map((c) => ({ ...c, name: `${c.a} - ${c.b}, step ${c.step}`, kind: "arms" }));
  const base = group().against_base.map((c) => ({ ...c, name: `${c.cell} step ${c.step} - base`, kind: "base" }));
  return [...arms, ...base.reverse()];
}
function showPair() {
  const list = pairs(), chosen = list[Math.min(state.pair, list.length - 1)];
  $("pair").replaceChildren(...list.map((c, i) => make("option", { value: i }, c.name)));
  if (!chosen) { $("difference").replaceChildren(make("p", { class: "soft" }, "nothing to compare")); $("difference-text").textContent = ""; return; }
  $("pair").value = String(Math.min(state.pair, list.length - 1));
  const many = (name) => chosen[name].map((v) => 100 * v);
  const e = many("effect"), lo = many("band_low"), hi = many("band_high"), k = state.k;
  $("difference").replaceChildren(chart({
    caption: `${chosen.name}: difference in points, simultaneous 95 % band over all k (x ${chosen.multiplier})`,
    lines: [{ points: e.map((v, i) => [i + 1, v, lo[i], hi[i]]), colour: "var(--c0)", title: chosen.name }],
    xName: "k", yName: "points", log: true, zero: true, faintFrom: Math.max(1, group().n / 2) }));
  const outside = chosen.band_low[k - 1] > 0 || chosen.band_high[k - 1] < 0;
  const p = chosen.holm?.[k] !== undefined ? `p = ${chosen.p[k - 1]} (Holm over the pairs: ${chosen.holm[k]})` : `p = ${chosen.p[k - 1]} (exploratory)`;
  let text = `pass@${k}: ${e[k - 1].toFixed(1)} points, 95 % over problems [${(100 * chosen.low[k - 1]).toFixed(1)}, ${(100 * chosen.high[k - 1]).toFixed(1)}], ${p}. `;
  text += outside ? "It lies outside the simultaneous band: different." : `Within the simultaneous band: no difference shown; ${(100 * chosen.detectable[k - 1]).toFixed(1)} points would have been seen with 80 % power.`;
  if (chosen.kind === "base") {
    const t = chosen.transitions, s = chosen.support;
    text += ` Problems lost (solved at half of the samples, now not): ${percent(t.lost)} %, found: ${percent(t.found)} %.`;
    if (t.lost_tested !== null) text += ` Significant per problem (5 % false discoveries): ${t.lost_tested} down, ${t.found_tested} up.`;
    if (s.kept !== null) text += ` Of the problems that the base solves at least once, ${percent(s.kept)} % still are.`;
    if (chosen.retention) text += ` Retention of pass@1: ${percent(chosen.retention[0])} % [${percent(chosen.retention[1])}, ${percent(chosen.retention[2])}].`;
    text += chosen.crossover === null ? " The base is above at no k up to n." : ` From k = ${chosen.crossover} the base is above.`;
  }
  $("difference-text").textContent = text;
}
function showPaths() {
  if (!D.paths.length) { $("path").replaceChildren(make("p", { class: "soft" }, "needs the base model and another task")); return; }
  const figures = panels().map(({ model, lr, lr_text }) => {
    const here = D.paths.filter((p) => RUN[p.cell].model === model && RUN[p.cell].lr === lr);
    if (!here.length) return null;
    const lines = here.map((p) => ({ colour: colour(RUN[p.cell].arm), dots: true, title: p.cell,
      points: p.steps.map((s, i) => [100 * p.forgetting[i], 100 * p.gain[i], null, null, `${p.cell} step ${s}: gain ${(100 * p.gain[i]).toFixed(1)}, forgetting ${(100 * p.forgetting[i]).toFixed(1)}`]) }));
    return chart({ caption: `${model}, ${lr_text}: gain on ${here[0].trained}, forgetting on ${here[0].others.join(", ")}`, lines, xName: "forgetting, points", yName: "gain, points", zero: true });
  }).filter(Boolean);
  const front = new Set(D.front);
  const rows = D.paths.map((p) => [p.cell, p.steps.at(-1), points(p.gain.at(-1)), points(p.forgetting.at(-1)), points(p.max_forgetting), p.area === null ? "-" : points(p.area), p.steps.filter((s) => front.has(`${p.cell} step ${s}`)).join(", ")]);
  $("path").replaceChildren(...figures);
  $("path-tables").replaceChildren(table(["run", "last step", "gain", "forgetting", "worst forgetting (biased up by noise)", "area of forgetting", "steps on the front"], rows),
    ...(D.matched.length ? [make("h3", {}, "Forgetting at the largest gain that all arms reach"), table(["run", "gain", "forgetting"], D.matched.map((m) => [m.cell, points(m.gain), m.forgetting === null ? "-" : points(m.forgetting)]))] : []));
}
const between = (v, lo, hi, digits) => v.toFixed(digits) + (lo === null || lo === undefined ? "" : ` [${lo.toFixed(digits)}, ${hi.toFixed(digits)}]`);
function showDistance() {
  const rows = D.kl.points;
  if (!rows.length) { $("kl").replaceChildren(make("p", { class: "soft" }, "was not measured")); return; }
  const figures = [...new Set(rows.map((r) => `${r.model}|${r.measure}|${r.settings}`))].map((key) => {
    const here = rows.filter((r) => `${r.model}|${r.measure}|${r.settings}` === key && r.forgetting !== null);
    if (!here.length) return null;
    const { model, measure, settings } = here[0];
    const lines = [...new Set(here.map((r) => r.cell))].map((cell) => ({ colour: colour(RUN[cell].arm), dots: true, title: cell,
      points: here.filter((r) => r.cell === cell).sort((a, b) => a.step - b.step).map((r) => [r.per_sequence, 100 * r.forgetting, null, null, `${cell} step ${r.step}: ${measure} ${r.per_sequence.toFixed(3)}, forgetting ${points(r.forgetting)}`]) }));
    const fit = D.kl.fits.find((f) => f.model === model && f.settings === settings && measure === "KL to base");
    if (fit) { const end = Math.max(...here.map((r) => r.per_sequence)); lines.push({ colour: "var(--base)", dash: true, title: "fit", points: Array.from({ length: 41 }, (_, i) => end * i / 40).map((x) => [x, 100 * (fit.a * x + fit.b * x * x)]) }); }
    const said = fit ? `: F = ${fit.a.toPrecision(3)} KL ${fit.b < 0 ? "-" : "+"} ${Math.abs(fit.b).toPrecision(3)} KL\u00b2, R\u00b2 = ${fit.r2 === null ? "-" : fit.r2.toFixed(3)}, ${fit.points} checkpoints` : "";
    return chart({ caption: `${model}${said}`, lines, xName: `${measure}, nats per sequence`, yName: "forgetting, points", zero: true });
  }).filter(Boolean);
  $("kl").replaceChildren(...figures);
  $("kl-table").replaceChildren(table(["run", "step", "measure", "per sequence", "per token", "prompts", "forgetting"], rows.map((r) => [r.cell, r.step, r.measure,
    between(r.per_sequence, r.low, r.high, 3), between(r.per_token, r.token_low, r.token_high, 5), r.prompts, r.forgetting === null ? "-" : points(r.forgetting)])));
}
function showComparisons() {
  const axes = { step: "step", updates: "optimiser steps", tokens: "tokens sampled" };
  const made = D.comparisons.flatMap((c) => [
    make("h3", {}, c.name, " ", make("span", { class: "verdict" }, c.recorded)),
    ...c.notes.map((n) => make("p", { class: "soft" }, n)),
    ...(c.scores.length ? [table(["readout", c.each || "pair", "step", "difference, points (95 %)", "p", "Holm", "would have been seen", "arms"],
      c.scores.map((s) => [s.readout, s.each || "-", s.step, between(100 * s.effect, 100 * s.low, 100 * s.high, 1), s.p.toFixed(4), `${s.holm.toFixed(4)} of ${s.family}`, points(s.detectable), `${s.a} - ${s.b}`]))] : []),
    ...(c.curves.length ? [make("div", { class: "grid" }, ...c.curves.map((g) => chart({ caption: `${g.readout} over ${axes[g.axis]}`, xName: axes[g.axis], yName: "",
      lines: g.lines.map((l) => ({ points: l.points, colour: colour(RUN[l.run].arm), width: 1.2, title: l.run })) })))] : []),
    ...(c.steps.length ? [table(["readout", "arms", "steps", "mean difference", "sd over steps", "first arm above", "updates", "tokens"],
      c.steps.map((s) => [s.readout, `${s.a} - ${s.b}`, s.steps, s.mean.toFixed(4), s.sd === null ? "-" : s.sd.toFixed(4), `${s.a_above} of ${s.steps}`, `${s.updates_a} and ${s.updates_b}`, `${s.tokens_a} and ${s.tokens_b}`]))] : []),
  ]);
  $("comparisons").replaceChildren(...(made.length ? made : [make("p", { class: "soft" }, "none was declared")]));
}
const points = (x) => (100 * x).toFixed(1);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const mix = (a, b, t) => { const h = (c) => [1, 3, 5].map((i) => parseInt(c.slice(i, i + 2), 16)); const [x, y] = [h(a), h(b)]; return `rgb(${x.map((v, i) => Math.round(v + (y[i] - v) * t)).join(",")})`; };
function heatData() {
  const names = D.runs.map((r) => r.name).filter((c) => pointsOf(c).length), cell = names[Math.min(state.cell, names.length - 1)];
  const base = cell ? baseOf(RUN[cell].model) : undefined;
  const points = cell ? [...(base ? [base] : []), ...pointsOf(cell).filter((p) => p.step > 0)] : [];
  const key = (base || points[0])?.correct ?? [];
  const order = key.map((_, i) => i).sort((a, b) => key[a] - key[b] || a - b);
  return { names, cell, points, order };
}
function showHeat() {
  const { names, cell, points, order } = heatData();
  $("cell").replaceChildren(...names.map((c, i) => make("option", { value: i }, c))); $("cell").value = String(Math.min(state.cell, Math.max(0, names.length - 1)));
  const canvas = $("heat"), high = Math.max(2, Math.min(14, Math.floor(900 / Math.max(1, order.length)))), wide = Math.max(14, Math.min(60, Math.floor(520 / Math.max(1, points.length))));
  canvas.width = wide * points.length || 10; canvas.height = high * order.length || 10;
  if (!points.length) { $("detail").textContent = "nothing scored"; return; }
  const pen = canvas.getContext("2d"), from = css("--heat0"), to = css("--heat1");
  order.forEach((problem, row) => points.forEach((p, column) => { pen.fillStyle = mix(from, to, p.correct[problem] / group().n); pen.fillRect(column * wide, row * high, wide - 1, high > 3 ? high - 1 : high); }));
  state.row = Math.min(state.row, order.length - 1); state.column = Math.min(state.column, points.length - 1);
  pen.strokeStyle = css("--c1"); pen.lineWidth = 2; pen.strokeRect(state.column * wide + 1, state.row * high + 1, wide - 2, Math.max(2, high - 2));
  const problem = order[state.row], id = group().problems[problem], step = points[state.column].step;
  const detail = $("detail");
  detail.replaceChildren(make("h3", {}, `${id}, step ${step}: ${points[state.column].correct[problem]} of ${group().n} right`),
    make("div", { class: "scroll" }, table(["step", ...points.map((p) => String(p.step))], [["right", ...points.map((p) => p.correct[problem])]])));
  const found = (D.samples[`${group().task}|${group().settings}|${id}`] || []).filter((s) => s.cell === points[state.column].cell && s.step === step);
  for (const s of found) detail.append(make("p", { class: "soft" }, `${s.status}${s.detail ? ": " + s.detail : ""}`), make("pre", {}, s.text));
  if (!found.length) detail.append(make("p", { class: "soft" }, "no sample of this place is kept on this page; all are in the run's evals folder"));
}
function showTraining() {
  const figures = D.training.map((metric) => chart({ caption: metric.name, xName: "step", yName: "",
    lines: metric.lines.map((l) => ({ points: l.points, colour: colour(RUN[l.run].arm), width: 1.2, title: `${l.run} ${l.label || ""}` })) }));
  $("training").replaceChildren(...(figures.length ? figures : [make("p", { class: "soft" }, "no training record")]));
}
function showTables() {
  const g = group(), clustered = g.points.some((p) => p.cluster_se), head = ["cell", "step", ...g.shown.map((k) => `pass@${k}`), "cut %", "syntax %", "no answer %", "distinct %", "tokens", "pass@1 sampling SE", ...(clustered ? ["pass@1 cluster SE"] : [])];
  const rows = g.points.map((p) => [p.cell, p.step, ...g.shown.map((k) => { const [v, lo, hi] = at(p, k); return lo === null ? v.toFixed(1) : `${v.toFixed(1)} [${lo.toFixed(1)}, ${hi.toFixed(1)}]`; }),
    ...["cut", "syntax_error", "no_answer", "distinct"].map((r) => p.rates[r] === undefined ? "-" : percent(p.rates[r])), p.rates.mean_tokens === undefined ? "-" : p.rates.mean_tokens.toFixed(0),
    p.sampling_se ? `${(100 * p.sampling_se[0]).toFixed(2)}${p.sampling_method[0].includes("bootstrap") ? " (bootstrap)" : ""}` : "-", ...(clustered ? [p.cluster_se ? (100 * p.cluster_se[0]).toFixed(2) : "-"] : [])]);
  $("table").replaceChildren(make("p", { class: "soft" }, `${g.task}, ${g.problems.length} problems, n = ${g.n}, settings ${g.settings}; 95 %, over problems, B = 10000`), table(head, rows));
  const kept = D.stability.map((s) => [s.cell, s.kind + (s.marked ? " (last step only)" : ""), s.step]);
  const limits = D.limits.map((l) => [`${l.model} ${l.arm}`, l.rates.map((r) => r.toExponential()).join(", "), l.limit?.toExponential(), `${l.fell} of ${l.runs} [${percent(l.low)}, ${percent(l.high)}] %`]);
  $("stability").replaceChildren(...(limits.length ? [make("h3", {}, "Stability limit: largest learning rate with no seed unstable or collapsed at the end"), table(["model and arm", "learning rates", "limit", "runs that fell (95 % Wilson)"], limits)] : []), ...(kept.length ? [make("h3", {}, "Stability (one seed: a description, not an estimate)"), table(["run", "state", "since step"], kept)] : []));
}
function showOnce() {
  $("answer").replaceChildren(...D.answer.map((s) => make("div", {}, s)));
  $("notes").replaceChildren(...D.notes.map((s) => make("li", {}, s)));
  const legend = ARMS.map((arm) => { const i = make("i"); i.style.borderColor = colour(arm); return make("span", {}, i, arm); });
  const dash = make("i", { class: "dash" }); dash.style.borderColor = "var(--base)";
  $("legend").replaceChildren(...legend, make("span", {}, dash, "base model"));
  const verdicts = D.verdicts.flatMap((v) => [make("h3", {}, v.name, " ", make("span", { class: "verdict" }, v.verdict), " ", make("span", { class: "soft" }, v.recorded)), make("p", {}, v.sentence), table(["quantity", "value"], v.quantities), ...(v.guards.length ? [table(["guard", "holds", ""], v.guards)] : []), ...v.extra.map((t) => make("p", { class: "soft" }, t))]);
  $("verdicts").replaceChildren(...(verdicts.length ? verdicts : [make("p", { class: "soft" }, "none was declared")]));
  const leaks = D.leaks.flatMap((l) => [make("p", {}, l.text), ...(l.rows.length ? [table(["training problem", "evaluation problem", "likeness", "why"], l.rows)] : [])]);
  $("leaks").replaceChildren(...(leaks.length ? leaks : [make("p", { class: "soft" }, "nothing to compare")]));
  $("settings").replaceChildren(...D.settings.map(([name, value]) => make("details", {}, make("summary", {}, name), make("pre", {}, value))));
}
function showGroup() {
  const g = group();
  if (!g) return;
  $("k").replaceChildren(...g.shown.map((k) => make("option", { value: k }, String(k))));
  if (!g.shown.includes(state.k)) state.k = g.shown[0];
  $("k").value = String(state.k);
  state.step = Math.max(0, stepList().length - 1); state.pair = 0; state.row = 0; state.column = 0;
  showSteps(); showCurves(); showPair(); showHeat(); showTables();
}
function listen() {
  $("group").replaceChildren(...D.groups.map((g, i) => make("option", { value: i }, `${g.task} (${g.settings})`)));
  $("group").addEventListener("change", (e) => { state.group = +e.target.value; showGroup(); });
  $("k").addEventListener("change", (e) => { state.k = +e.target.value; showSteps(); showPair(); });
  $("step").addEventListener("input", (e) => { state.step = +e.target.value; showCurves(); });
  $("pair").addEventListener("change", (e) => { state.pair = +e.target.value; showPair(); });
  $("cell").addEventListener("change", (e) => { state.cell = +e.target.value; state.row = state.column = 0; showHeat(); });
  $("heat").addEventListener("click", (e) => {
    const box = e.target.getBoundingClientRect(), { points, order } = heatData();
    state.column = Math.min(points.length - 1, Math.floor((e.clientX - box.left) / box.width * points.length));
    state.row = Math.min(order.length - 1, Math.floor((e.clientY - box.top) / box.height * order.length)); showHeat();
  });
  $("heat").addEventListener("keydown", (e) => {
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[e.key];
    if (!move) return;
    e.preventDefault(); state.row = Math.max(0, state.row + move[0]); state.column = Math.max(0, state.column + move[1]); showHeat();
  });
  $("theme").addEventListener("click", () => { theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"); });
}
function theme(name) { document.documentElement.dataset.theme = name; if (D.groups.length) showHeat(); }
showOnce(); listen(); showGroup(); showPaths(); showDistance(); showComparisons(); showTraining();
theme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
