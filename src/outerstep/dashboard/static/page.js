// The page: logs in, listens, and writes what it hears into the document. Every text goes in as text.

import { Chart, Looks, hasCharts } from "./charts.js";
import { drawMap } from "./map.js";
import { SPOKEN, brief, clock, count, duration, list, make, named, parse, percent, rate, sentence, short, size, whole, write } from "./words.js";

const $ = (id) => document.getElementById(id);
const MOST_ROUNDS = 400, MOST_TOLD = 200, POLL_MS = 5000, RETRY_MS = 3000, TICK_MS = 1000, UNLOCKED_MS = 15 * 60 * 1000;

let data = null; // what the server told, kept up to date
let heardAt = 0; // when the newest status came, by this machine's clock
let wasLive = false;
const looks = new Looks();

// --- the line to the server -------------------------------------------------------------------------------------------

let source = null, polling = null;

function state(text, look) {
  const line = $("line");
  write(line, text);
  line.className = `pill ${look}`;
}

function listen() {
  source?.close();
  source = new EventSource("page/live");
  source.addEventListener("hello", (event) => { stopPolling(); begin(parse(event.data)); });
  source.addEventListener("update", (event) => merge(parse(event.data)));
  source.onerror = () => {
    state(wasLive ? "reconnecting" : "connecting", "warn");
    if (source.readyState === EventSource.CLOSED) look();
  };
}

// Why does nobody answer? No session, no place for one more page, or no server.
async function look() {
  try {
    const answer = await fetch("page/state", { cache: "no-store" });
    if (answer.status === 401) return askLogin((await answer.json()).error?.message);
    if (answer.ok) { begin(parse(await answer.text())); state("every few seconds", "warn"); if (!polling) polling = setInterval(look, POLL_MS); return; }
    state(`the server answers ${answer.status}`, "bad");
  } catch {
    state("no answer", "bad");
  }
  stopPolling();
  setTimeout(listen, RETRY_MS);
}

function stopPolling() {
  clearInterval(polling);
  polling = null;
}

function askLogin(why) {
  source?.close();
  stopPolling();
  state("not logged in", "warn");
  $("main").hidden = true;
  $("login").hidden = false;
  write($("login-why"), why || "");
  $("login-code").focus();
}

async function logIn(code) {
  const answer = await fetch("page/login", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ code }) });
  // A link that is clicked on twice: the session of the first time may be open.
  if (answer.ok || (await fetch("page/state", { cache: "no-store" })).ok) { $("login").hidden = true; listen(); } else askLogin((await answer.json()).error?.message);
}

$("login-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const typed = $("login-code").value.trim();
  $("login-code").value = "";
  logIn(typed.slice(typed.lastIndexOf("#") + 1));
});

$("logout").addEventListener("click", async () => {
  await fetch("page/logout", { method: "POST", headers: { "Content-Type": "application/json" }, body: "{}" });
  askLogin("You are logged out in this browser.");
});

// --- what came --------------------------------------------------------------------------------------------------------

function begin(told) {
  data = { losses: named([]), mean: [], traffic: [], rounds: [], told: [], refused: [], refusals: {}, gone: named([]), ...told };
  for (const name of Object.keys(data.losses)) looks.find(name);
  $("main").hidden = false;
  $("login").hidden = true;
  $("logout").hidden = data.open;
  arrived(true);
}

// As the server thins its own (history.py): a curve that is full loses every second point, so it shows the whole run.
function lengthen(curve, points) {
  for (const point of points) {
    curve = [...curve, point];
    if (curve.length >= data.most_points) curve = curve.filter((_, i) => i % 2 === 0);
  }
  return curve;
}

function merge(told) {
  if (!data) return;
  for (const [name, points] of Object.entries(told.losses || {})) data.losses[name] = lengthen(data.losses[name] || [], points);
  for (const key of ["mean", "traffic"]) data[key] = lengthen(data[key], told[key] || []);
  for (const [key, most] of [["rounds", MOST_ROUNDS], ["told", MOST_TOLD], ["refused", MOST_TOLD]]) {
    if (told[key]) data[key] = [...data[key], ...told[key]].slice(-most);
  }
  Object.assign(data, { status: told.status, now: told.now, refusals: told.refusals, gone: told.gone, pages: told.pages });
  say((told.told || []).filter((event) => SPOKEN.has(event.kind)).map((event) => sentence(event)[1]));
  arrived(false);
}

function arrived(isFirst) {
  heardAt = performance.now();
  wasLive = true;
  state("live", "good");
  if (isFirst) setOrders();
  showAll();
}

const isPeer = () => data.status.mode === "gossip";
const passed = () => (performance.now() - heardAt) / 1000;
const members = () => (isPeer() ? named(data.status.members.map((member) => [member.peer_id, member])) : data.status.workers || {});
const version = () => (isPeer() ? data.status.fragments.reduce((least, each) => Math.min(least, each.version), data.status.fragments[0]?.version ?? 0) : data.status.sync_round);
const silence = (member) => (member.last_seen_s === null || member.last_seen_s === undefined ? 0 : member.last_seen_s + passed());

// Those that have been silent for longer than a live one would be: a worker beats three times within the timeout.
function silent() {
  const limit = data.status.heartbeat_timeout || 0;
  return new Set(Object.entries(members()).filter(([name, member]) => (isPeer() ? data.status.silent.includes(name) : limit > 0 && silence(member) > limit / 2)).map(([name]) => name));
}

function showAll() {
  const status = data.status;
  document.title = `${status.failure || status.trouble ? "⚠ " : ""}round ${version()} · outerstep`;
  write($("run"), isPeer() ? `peer ${status.peer_id} · run ${status.run_id} · block ${status.height}` : `run ${status.run_id} · ${status.mode} · outerstep ${status.outerstep}`);
  document.body.classList.toggle("peer", isPeer());
  showTiles();
  showLoss();
  showWorkers();
  showFragments();
  showRounds();
  showBytes();
  showPlan();
  showRefusals();
  showTold();
  showMap();
  showData();
  tick();
}

// Every second: what counts up or down by itself.
function tick() {
  if (!data || $("main").hidden) return;
  showAlerts();
  speakOfSilence();
  for (const [name, row] of workerRows) {
    const member = members()[name];
    if (member) showSeen(row, name, member);
  }
  for (const [name, row] of workerRows) if (data.gone[name]) write(row.cells.seen, `${duration(data.now + passed() - data.gone[name].time)} ago`);
  data.status.fragments.forEach((fragment, i) => showWaiting(i, fragment));
  const uptime = tiles.get("up");
  if (uptime) write(uptime.value, brief(data.status.uptime_s + passed()));
}
setInterval(tick, TICK_MS);

// --- alerts -----------------------------------------------------------------------------------------------------------

const alerts = new Map();

function showAlerts() {
  const status = data.status, wanted = [];
  if (status.failure) wanted.push(["failure", "bad", `Stopped: ${status.failure}`]);
  if (status.trouble) wanted.push(["trouble", "bad", status.trouble]);
  if (status.closing) wanted.push(["closing", "warn", `Shutting down: ${status.closing}`]);
  if (status.above?.failure) wanted.push(["above", "warn", `On its own: ${status.above.failure}`]);
  if (status.is_short_of_peers) wanted.push(["short", "warn", "Too few peers answer: nothing can be decided until more come back."]);
  const limit = status.heartbeat_timeout;
  for (const name of silent()) {
    const member = members()[name];
    if (isPeer()) wanted.push([`silent ${name}`, "warn", `${name} is silent.`]);
    else {
      const left = Math.max(0, limit - silence(member));
      wanted.push([`silent ${name}`, "warn", `${name} has been silent for ${duration(silence(member))}; in ${duration(left)} it counts as dead and the round goes on without it.`, left / limit]);
    }
  }
  for (const [key, shown] of alerts) if (!wanted.some(([each]) => each === key)) { shown.box.remove(); alerts.delete(key); }
  for (const [key, look, text, share] of wanted) {
    let shown = alerts.get(key);
    if (!shown) {
      shown = { text: make("span") };
      shown.box = make("div", { class: `alert ${look}`, role: share === undefined ? "alert" : null }, shown.text);
      if (share !== undefined) shown.box.append((shown.bar = make("progress", { max: 1, "aria-label": `time left for ${key.slice(7)}` })));
      alerts.set(key, shown);
      $("alerts").append(shown.box);
    }
    write(shown.text, text);
    if (shown.bar) shown.bar.value = share;
  }
}

// The countdown changes each second, which nobody wants read out: it is told when somebody falls silent, and when it is
// heard again. That it is dead is an event, and told as such.
let spokenSilent = new Set();

function speakOfSilence() {
  const now = silent(), limit = data.status.heartbeat_timeout;
  const fell = [...now].filter((name) => !spokenSilent.has(name)), back = [...spokenSilent].filter((name) => !now.has(name) && members()[name]);
  spokenSilent = now;
  const dies = (name) => (isPeer() ? "" : `; in ${duration(Math.max(0, limit - silence(members()[name])))} it counts as dead`);
  say([...fell.map((name) => `${name} is silent${dies(name)}`), ...back.map((name) => `${name} is heard again`)]);
}

function say(sentences) {
  if (sentences.length) write($("said"), sentences.slice(-3).join(". "));
}

// --- tiles ------------------------------------------------------------------------------------------------------------

const tiles = new Map();

function tile(key, name, value, under = "") {
  let shown = tiles.get(key);
  if (!shown) {
    shown = { value: make("dd"), under: make("dd", { class: "under" }) };
    $("tiles").append(make("div", {}, make("dt", {}, name), shown.value, shown.under));
    tiles.set(key, shown);
  }
  write(shown.value, value);
  write(shown.under, under);
}

function utilization() {
  // Of the time between the last rounds, the share in which nobody waited for the last contribution.
  const recent = data.rounds.filter((each) => each.fragment === 0 && each.waited_s !== undefined).slice(-6);
  if (recent.length < 2) return null;
  const span = recent[recent.length - 1].time - recent[0].time;
  return span > 0 ? Math.max(0, 1 - recent.slice(1).reduce((sum, each) => sum + each.waited_s, 0) / span) : null;
}

function showTiles() {
  const status = data.status, here = Object.keys(members()).length, mean = data.mean;
  tile("round", isPeer() ? "Version" : "Round", count(version()), data.rounds.length ? `last at ${clock(data.rounds[data.rounds.length - 1].time)}` : "none yet");
  const newest = mean.length ? mean[mean.length - 1][2] : null, before = mean.length > 1 ? mean[mean.length - 2][2] : null;
  tile("loss", "Loss", short(newest), before === null ? "" : newest < before ? `↓ from ${short(before)}` : newest > before ? `↑ from ${short(before)}` : "as before");
  tile("workers", isPeer() ? "Peers" : "Workers", isPeer() ? count(here) : `${here} of ${Math.max(status.num_workers, here)}`, isPeer() ? list(status.expelled.map((name) => `${name} expelled`)) : status.total_worker_deaths ? `${status.total_worker_deaths} died so far` : "");
  if (!isPeer()) {
    const tokens = status.tokens || {};
    if (tokens.total) tile("tokens", "Tokens", count(tokens.total), tokens.budget ? `of ${count(tokens.budget)}${tokens.seconds_left === null ? "" : `, ${duration(tokens.seconds_left)} left`}` : `${count(tokens.per_second)} a second`);
    else tile("contributions", "Contributions", count(status.total_submissions), status.pool_queue ? `${status.pool_queue} queue` : "");
    const expected = status.layer?.utilization, found = utilization();
    if (found !== null || (expected !== null && expected !== undefined)) tile("utilization", "Utilization", percent(found ?? expected), found !== null && status.layer ? `target ${percent(status.layer.target_utilization)}` : "not waiting for others");
  }
  tile("bytes", "Received", size(status.bytes_received), `sent ${size(status.bytes_sent)}`);
  tile("up", "Up", brief(status.uptime_s), isPeer() ? "" : `${data.pages} page${data.pages === 1 ? "" : "s"} open`);
}

// --- charts -----------------------------------------------------------------------------------------------------------

const charts = {
  loss: new Chart($("loss-chart"), { label: "Loss", height: 280, isTime: () => $("loss-over").value === "time", writeX: (x) => ($("loss-over").value === "time" ? clock(x) : count(x)), writeY: (y) => short(y) }),
  agree: new Chart($("agree-chart"), { label: "Similarity and divergence by version", writeX: (x) => count(x), writeY: (y) => short(y, 3) }),
  wait: new Chart($("wait-chart"), { label: "Seconds per round by version", zero: true, writeX: (x) => count(x), writeY: (y) => `${short(y, 3)} s` }),
  bytes: new Chart($("bytes-chart"), { label: "Bytes a second", zero: true, isTime: () => true, writeX: (x) => clock(x), writeY: (y) => rate(y) }),
};
$("loss-over").addEventListener("change", () => data && showLoss());

function showLoss() {
  const byTime = $("loss-over").value === "time", x = (point) => point[byTime ? 0 : 1];
  const lines = Object.entries(data.losses).map(([name, points]) => ({ name: data.gone[name] ? `${name} (gone)` : name, ...looks.find(name), points: points.map((point) => [x(point), point[2]]) }));
  if (byTime && data.mean.length) lines.unshift({ name: "mean of the contributors", look: "ink", thick: true, points: data.mean.map((point) => [point[0], point[2]]) });
  charts.loss.draw(lines);
  if ($("loss-table").closest("details").open) {
    const rows = Object.entries(data.losses).map(([name, points]) => { const last = points[points.length - 1], least = Math.min(...points.map((point) => point[2])); return [name, short(points[0][2]), short(last[2]), short(least), count(last[1]), clock(last[0])]; });
    table($("loss-table"), ["worker", "first", "newest", "least", "step", "at"], rows);
  }
}

function showRounds() {
  const rounds = data.rounds, of = (name, get) => rounds.filter((each) => each[name] !== undefined).map((each) => [each.version, get ? get(each) : each[name]]);
  charts.agree.draw([
    { name: "similarity", look: "c0", points: of("peer_grad_similarity") },
    { name: "divergence", look: "c1", points: of("weight_divergence") },
  ]);
  // The first round waits for workers to join: that says nothing of the others, and would flatten them.
  const first = rounds.filter((each) => each.fragment === 0 && each.version > 1), gaps = first.slice(1).map((each, i) => [each.version, each.time - first[i].time]);
  charts.wait.draw([
    { name: "round", look: "c0", points: gaps },
    { name: "first waits for last", look: "c4", points: first.filter((each) => each.waited_s !== undefined).map((each) => [each.version, each.waited_s]) },
  ]);
  $("latest").replaceChildren(...rounds.slice(-5).reverse().map((each) => moment(each.time, "", roundLine(each))));
  if ($("rounds").closest("details").open) {
    const rows = rounds.slice(-60).reverse().map((each) => [each.version, each.fragment, list(each.workers, 4), short(each.loss), each.staleness, short(each.peer_grad_similarity, 3), short(each.weight_divergence, 3), short(each.aggregated_grad_norm, 3), each.waited_s === undefined ? "–" : `${short(each.waited_s, 3)} s`, each.bytes === undefined ? "–" : size(each.bytes), clock(each.time)]);
    table($("rounds"), ["version", "fragment", "workers", "loss", "staleness", "similarity", "divergence", "‖Δ̄‖", "waited", "bytes", "at"], rows);
  }
}

// As the terminal tells it.
const roundLine = (each) => [
  `version ${each.version}${data.status.fragments.length > 1 ? ` of fragment ${each.fragment}` : ""}`,
  each.count > 2 ? `${each.count} workers` : each.workers.join(" + "),
  each.loss === undefined ? "" : whole(`loss ${short(each.loss)}`),
  each.waited_s === undefined ? "" : whole(`waited ${short(each.waited_s, 2)} s`),
  each.bytes === undefined ? "" : whole(size(each.bytes)),
].filter(Boolean).join(" · ");

function showBytes() {
  charts.bytes.draw([
    { name: "received", look: "c2", points: data.traffic.map((point) => [point[0], point[1]]) },
    { name: "sent", look: "c0", points: data.traffic.map((point) => [point[0], point[2]]) },
  ]);
  if ($("links").closest("details").open) {
    const rows = (data.status.links || []).slice(0, 200).map((link) => [link.source, link.target, rate(link.bytes_per_s), `${Math.round(link.latency_s * 1000)} ms`, duration(link.age_s), link.measured_by]);
    table($("links"), ["from", "to", "speed", "delay", "age", "measured by"], rows);
  }
  if ($("traffic").closest("details").open) table($("traffic"), ["at", "received", "sent"], data.traffic.slice(-60).reverse().map((point) => [clock(point[0]), rate(point[1]), rate(point[2])]));
}
for (const details of document.querySelectorAll("details")) details.addEventListener("toggle", () => data && (showLoss(), showRounds(), showBytes(), showData()));

function showMap() {
  const place = $("map"), { scrollLeft, scrollTop } = place;
  place.replaceChildren(drawMap(data.status, data.gone, silent(), place.clientWidth));
  Object.assign(place, { scrollLeft, scrollTop });
}

// What the run leases to its workers, in units (docs/concepts/data.md).
function showData() {
  const datasets = data.status.data || [], end = (each) => (each.units && each.units_per_second && each.done < each.units ? `in ${duration((each.units - each.done) / each.units_per_second)}` : "–");
  $("data").hidden = datasets.length === 0;
  if (!datasets.length) return;
  const inside = datasets.some((each) => each.granted !== null), above = (each) => (inside ? [each.granted === null ? "–" : count(each.granted) + (each.waiting_for ? `, waiting for ${each.waiting_for}` : "")] : []);
  table($("datasets"), ["dataset", "units", "done", "", "leased", "given back", "lost", "spent", "again", "end", ...(inside ? ["from above"] : [])], datasets.map((each) => [each.name, each.units ? count(each.units) : "no end", count(each.done), each.units ? percent(each.done / each.units) : "–", count(each.leased), count(each.free), count(each.lost), count(each.spent), count(each.repeated), end(each), ...above(each)]));
  if (!$("data-workers").closest("details").open) return;
  const names = (each) => [...new Set([...Object.keys(each.done_by), ...Object.keys(each.leased_to)])].sort().slice(0, 200);
  const clusters = data.status.clusters || {}, called = (name) => (clusters[name] && clusters[name].members.length ? `${name} (a cluster of ${clusters[name].size})` : name);
  table($("data-workers"), ["dataset", "worker", "done", "leased"], datasets.flatMap((each) => names(each).map((name) => [each.name, called(name), count(each.done_by[name] || 0), count(each.leased_to[name] || 0)])));
}

// --- tables -----------------------------------------------------------------------------------------------------------

function table(place, heads, rows) {
  place.replaceChildren(
    make("thead", {}, make("tr", {}, ...heads.map((head) => make("th", { scope: "col" }, head)))),
    make("tbody", {}, ...(rows.length ? rows.map((row) => make("tr", {}, ...row.map((cell) => make("td", {}, String(cell))))) : [make("tr", {}, make("td", { colspan: heads.length }, "none"))])),
  );
}

const COLUMNS = [["state", "state"], ["step", "step"], ["speed", "steps/s"], ["loss", "loss"], ["use", "computes"], ["stale", "staleness"], ["sent", "sent"], ["seen", "heard"], ["orders", ""]];
const workerRows = new Map();
$("workers").append(make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "name"), ...COLUMNS.map(([key, head]) => make("th", { scope: "col", class: key }, head)))), make("tbody"));

function rowFor(name) {
  let row = workerRows.get(name);
  if (row) return row;
  const { look } = looks.find(name), cells = {};
  const host = make("span", { class: "soft" }), title = make("th", { scope: "row", class: "name" }, make("span", { class: `swatch ${look}` }), name, host);
  const line = make("tr", {}, title);
  for (const [key, head] of COLUMNS) line.append((cells[key] = make("td", { "data-label": head, class: key })));
  cells.badge = make("span", { class: "badge" });
  cells.more = make("span", { class: "soft" });
  cells.state.append(make("span", {}, cells.badge, cells.more));
  for (const kind of ["sync", "drain", "kick"]) {
    const button = make("button", { type: "button", "aria-label": `${kind} ${name}` }, kind);
    button.addEventListener("click", () => order(kind, name));
    cells.orders.append(button);
  }
  row = { line, host, cells };
  workerRows.set(name, row);
  $("workers").querySelector("tbody").append(line);
  return row;
}

function badge(row, text, look, more = "") {
  write(row.cells.badge, text);
  row.cells.badge.className = `badge ${look}`;
  write(row.cells.more, more);
}

function showSeen(row, name, member) {
  const isSilent = silent().has(name), limit = data.status.heartbeat_timeout;
  write(row.cells.seen, member.self ? "itself" : `${duration(silence(member))} ago`);
  const quarantine = member.quarantine, trouble = member.trouble;
  if (quarantine) badge(row, "quarantine", "bad", `${duration(Math.max(0, quarantine.left_s - passed()))} left: ${quarantine.reason}`);
  else if (isSilent) badge(row, "silent", "warn", isPeer() ? "" : `counts as dead in ${duration(Math.max(0, limit - silence(member)))}`);
  else if (trouble) badge(row, "trouble", "warn", trouble);
  else badge(row, member.state || "here", "good", (member.commands || []).length ? `told to ${member.commands.join(", ")}` : member.left_out ? `${member.left_out} left out` : "");
}

function showWorkers() {
  const here = members(), clusters = data.status.clusters || {}, gone = data.gone;
  for (const [name, row] of workerRows) if (!here[name] && !gone[name]) { row.line.remove(); workerRows.delete(name); }
  for (const [name, member] of Object.entries(here)) {
    const row = rowFor(name), cells = row.cells, cluster = clusters[name];
    row.line.className = "";
    const size_ = cluster && cluster.size > 1 ? `cluster of ${cluster.size}` : "";
    write(row.host, [member.hostname || member.address || "", size_, cluster ? (cluster.accelerators || []).join(", ") : ""].filter(Boolean).join(" · "));
    showSeen(row, name, member);
    write(cells.step, count(member.step));
    write(cells.speed, member.steps_per_second ? short(member.steps_per_second, 3) : "–");
    write(cells.loss, short(member.loss));
    write(cells.use, share(name, member));
    write(cells.stale, member.staleness === undefined ? "–" : String(member.staleness));
    write(cells.sent, member.bytes_received === undefined ? "–" : size(member.bytes_received));
    for (const button of cells.orders.children) button.hidden = false;
  }
  for (const [name, how] of Object.entries(gone)) {
    if (here[name]) continue;
    const row = rowFor(name), cells = row.cells;
    row.line.className = "gone";
    const words = { death: ["died", "bad", `silent for ${duration(how.silent_s)}`], kick: ["removed", "bad", how.reason || ""], expelled: ["expelled", "bad", ""], leave: ["left", "", how.reason || ""] }[how.how] || [how.how, "", ""];
    badge(row, ...words);
    for (const key of ["step", "speed", "use", "stale", "sent"]) write(cells[key], "");
    const points = data.losses[name];
    write(cells.loss, points ? short(points[points.length - 1][2]) : "");
    for (const button of cells.orders.children) button.hidden = true;
  }
}

// How much of the time a worker computes: its pace over the last minute against its pace while it trains.
const paces = new Map();
function share(name, member) {
  if (member.step === null || member.step === undefined || !member.steps_per_second) return "–";
  const seen = paces.get(name) || [], now = data.now;
  if (!seen.length || seen[seen.length - 1][1] !== member.step) seen.push([now, member.step]);
  while (seen.length > 2 && now - seen[0][0] > 60) seen.shift();
  paces.set(name, seen);
  const [[t0, s0], [t1, s1]] = [seen[0], seen[seen.length - 1]];
  return t1 - t0 < 4 ? "–" : percent(Math.min(1, (s1 - s0) / (t1 - t0) / member.steps_per_second));
}

// --- rounds, plan, lists ----------------------------------------------------------------------------------------------

const fragments = [];

function showFragments() {
  const shown = data.status.fragments.slice(0, 16);
  while (fragments.length > shown.length) fragments.pop().box.remove();
  shown.forEach((fragment, i) => {
    if (!fragments[i]) {
      const each = (fragments[i] = { title: make("strong"), who: make("p"), waits: make("p", { class: "soft" }), bar: make("progress", { "aria-label": `contributions to fragment ${i}` }) });
      each.box = make("div", { class: "fragment" }, make("p", {}, each.title), each.bar, each.who, each.waits);
      $("fragments").append(each.box);
    }
    const { title, who, bar } = fragments[i], done = fragment.contributed || [], expected = [...new Set([...(fragment.expected || []), ...done])];
    write(title, `${shown.length > 1 ? `Fragment ${i}, v` : "V"}ersion ${fragment.version + 1} is open`);
    // Before the first round has begun, it waits for workers that have not joined, too.
    const most = data.status.started === false ? Math.max(expected.length, data.status.num_workers || 0) : expected.length;
    bar.hidden = !most;
    bar.max = Math.max(most, 1);
    bar.value = done.length;
    write(who, most ? `${done.length} of ${most} have contributed${done.length ? `: ${list(done)}` : ""}` : "");
    showWaiting(i, fragment);
  });
}

function showWaiting(i, fragment) {
  if (!fragments[i]) return;
  const awaited = (fragment.expected || []).filter((name) => !(fragment.contributed || []).includes(name));
  const until = fragment.closes_in_s === null || fragment.closes_in_s === undefined ? "" : `; closes in ${duration(Math.max(0, fragment.closes_in_s - passed()))}, whoever is missing`;
  const waits = fragment.waiting_for ? `Waits for ${fragment.waiting_for}` : awaited.length ? `Waits for ${list(awaited)}` : "";
  write(fragments[i].waits, waits + until);
}

function showPlan() {
  const { plan, layer } = data.status, pairs = [];
  if (plan) {
    pairs.push(["H", `${plan.sync_every} steps between exchanges`], ["codec", plan.down_codec ? `${plan.codec}, down ${plan.down_codec}` : plan.codec], ["fragments", plan.num_fragments]);
    if (plan.fragment_delay) pairs.push(["delay", `${plan.fragment_delay} steps`]);
    if (plan.revision) pairs.push(["changed", `${plan.revision} times`]);
  } else pairs.push(["plan", isPeer() ? "every peer has it from the founder" : "open until the first worker joins"]);
  if (!isPeer()) pairs.push(["rule", data.status.aggregation], ["weights", data.status.weight_by]);
  if (data.status.num_parameters) pairs.push(["parameters", count(data.status.num_parameters)]);
  if (layer) {
    pairs.push(["target", percent(layer.target_utilization)], ["expected", percent(layer.utilization)]);
    if (layer.plan) pairs.push(["route", layer.plan.route]);
    if (layer.last) pairs.push(["last decision", `round ${layer.last.round}: ${layer.last.reason}`]);
  }
  $("plan").replaceChildren(...pairs.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, String(value))]));
  const made = (layer?.decisions || []).slice(-20).reverse();
  $("decisions").replaceChildren(...made.map((each) => make("li", {}, make("span", { class: "soft" }, `round ${each.round}`), make("span", {}, `${Object.entries(each.changes).map(([name, text]) => `${name} ${text}`).join(", ")}: ${each.reason}`))));
}

const moment = (time, look, text) => make("li", {}, make("time", { datetime: new Date(time * 1000).toISOString() }, clock(time)), make("span", { class: look }, text));

function showRefusals() {
  const counts = isPeer() ? data.status.refused : data.refusals, left = isPeer() ? {} : Object.fromEntries(Object.entries(members()).filter(([, member]) => member.left_out).map(([name, member]) => [`${name}: left out`, member.left_out]));
  const all = Object.entries({ ...counts, ...left }).sort((a, b) => b[1] - a[1]).slice(0, 40);
  $("counts").replaceChildren(...(all.length ? all.map(([name, number]) => make("li", {}, `${name} ${count(number)}`)) : [make("li", {}, "none")]));
  const told = data.refused.slice(-40).reverse();
  $("refused").replaceChildren(...told.map((each) => moment(each.time, "", [each.code, each.worker, each.token && `token ${each.token}`, each.peer || each.address, each.path || each.request, each.why || each.reason].filter(Boolean).join(" · "))));
}

let toldLast = null;
function showTold() {
  const newest = data.told[data.told.length - 1];
  if (newest === toldLast) return;
  toldLast = newest;
  $("told").replaceChildren(...data.told.slice(-100).reverse().map((each) => moment(each.time, ...sentence(each))));
}

// --- model and control ------------------------------------------------------------------------------------------------

const admin = { token: "", timer: null };
const ORDERS = {
  save: ["Save now?", "The server writes its state between two rounds.", "Save"],
  sync: ["Let them contribute now?", "Every worker, or this one, contributes at its next step.", "Sync"],
  drain: ["Drain?", "Every worker, or this one, contributes what it has and leaves. A drained worker does not come back by itself.", "Drain"],
  kick: ["Remove this worker?", "It is out of the run at once, and what it has not sent is lost. It may join again when it is restarted.", "Remove"],
  shutdown: ["Shut the run down?", "All workers contribute and leave, the state is saved, and the server stops.", "Shut down"],
};

function setOrders() {
  $("model-line").hidden = !data.model;
  $("control").hidden = !data.orders || isPeer();
  $("no-control").hidden = data.orders || isPeer();
  $("unlock").hidden = data.open;
  if (data.open && data.orders) unlock("open");
}

function unlock(token) {
  admin.token = token;
  clearTimeout(admin.timer);
  if (token && token !== "open") admin.timer = setTimeout(() => unlock(""), UNLOCKED_MS);
  $("orders").hidden = !token;
  $("workers").classList.toggle("locked", !token);
  $("lock").hidden = token === "open";
  $("unlock").hidden = Boolean(token);
  if (data) showWorkers();
}

$("unlock").addEventListener("submit", (event) => {
  event.preventDefault();
  const typed = $("admin").value.trim(), token = /(admin-[A-Za-z0-9_-]{43})/.exec(typed)?.[1];
  $("admin").value = "";
  write($("answer"), token ? "Unlocked. Orders are confirmed one by one." : "That is not an admin token: it begins with admin-.");
  if (token) unlock(token);
});
$("lock").addEventListener("click", () => { unlock(""); write($("answer"), "Locked."); });
for (const button of document.querySelectorAll("[data-order]")) button.addEventListener("click", () => order(button.dataset.order, null));

function order(kind, worker) {
  const [title, text, yes] = ORDERS[kind];
  write($("ask-title"), worker ? `${title.replace("?", "")}: ${worker}?` : title);
  write($("ask-text"), text);
  write($("ask-yes"), yes);
  $("ask-reason").value = "";
  $("ask-yes").onclick = () => { $("ask").close(); send(kind, worker, $("ask-reason").value); };
  $("ask").showModal();
  $("ask-no").focus();
}
$("ask-no").addEventListener("click", () => $("ask").close());

async function send(kind, worker, reason) {
  const headers = { "Content-Type": "application/json" };
  if (admin.token && admin.token !== "open") headers.Authorization = `Bearer ${admin.token}`;
  write($("answer"), "Sent …");
  try {
    const answer = await fetch("v1/control", { method: "POST", headers, credentials: "omit", body: JSON.stringify({ kind, worker_id: worker, reason }) });
    const said = await answer.json();
    write($("answer"), answer.ok ? said.done : `Refused: ${said.error?.message || answer.status}${said.error?.hint ? ` (${said.error.hint})` : ""}`);
    if (answer.status === 401) unlock("");
  } catch {
    write($("answer"), "No answer: nothing is known about this order. Look at what happened before you repeat it.");
  }
}

// Without charts, the numbers are what there is to see.
if (!hasCharts()) {
  $("no-charts").hidden = false;
  for (const details of document.querySelectorAll("section:has(.chart) details")) details.open = true;
}

// --- begin ------------------------------------------------------------------------------------------------------------

const code = location.hash.slice(1);
if (/^[A-Za-z0-9_-]{32}$/.test(code)) {
  history.replaceState(null, "", location.pathname); // so that neither the address bar nor the history keeps it
  logIn(code);
} else listen();
