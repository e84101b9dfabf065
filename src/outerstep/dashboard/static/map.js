// The run as a map: the layer above, this server, its clusters or workers, and what they measured of the links between.

import { duration, rate } from "./words.js";

const SVG = "http://www.w3.org/2000/svg";

const WIDE = 164, HIGH = 62, GAP = 26, DEEP = 148, MOST = 24, MOST_MEMBERS = 6;
const cut = (text, most = 20) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

function draw(tag, attributes, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== null && value !== undefined) made.setAttribute(name, String(value));
  if (text !== undefined) made.textContent = text;
  return made;
}

function node(x, y, title, lines, look) {
  const group = draw("g", { class: `node ${look}`, transform: `translate(${x - WIDE / 2} ${y})` });
  group.append(draw("title", {}, [title, ...lines].join("\n")), draw("rect", { width: WIDE, height: HIGH, rx: 10 }), draw("text", { x: WIDE / 2, y: 24 }, cut(title)));
  lines.slice(0, 2).forEach((line, i) => group.append(draw("text", { x: WIDE / 2, y: 40 + 14 * i, class: "small" }, cut(line, 26))));
  return group;
}

function wire(from, to, text, look, width) {
  const middle = (from.y + to.y) / 2, group = draw("g", {});
  group.append(draw("path", { class: `link ${look}`, "stroke-width": width, d: `M${from.x} ${from.y}C${from.x} ${middle} ${to.x} ${middle} ${to.x} ${to.y}` }));
  if (text) {
    // Beside the edge, on the side that it bends away from: nothing is drawn over it.
    const lines = text.split("\n"), side = to.x < from.x ? -1 : 1, x = to.x + side * 12, y = to.y - 10 - 14 * (lines.length - 1);
    lines.forEach((line, i) => group.append(draw("text", { x, y: y + 14 * i, class: `small ${side < 0 ? "end" : "start"}` }, line)));
  }
  return group;
}

const thick = (speed) => (speed > 0 ? Math.min(8, Math.max(1.2, Math.log10(speed) - 2.5)) : 1.2);

function speeds(links, name) {
  const up = links.find((link) => link.source === name), down = links.find((link) => link.target === name);
  const words = [up && `↑ ${rate(up.bytes_per_s)}`, down && `↓ ${rate(down.bytes_per_s)}`].filter(Boolean).join("\n");
  const delay = Math.max(up?.latency_s || 0, down?.latency_s || 0);
  return { text: [words, delay ? `${Math.round(delay * 1000)} ms` : ""].filter(Boolean).join("\n"), speed: Math.max(up?.bytes_per_s || 0, down?.bytes_per_s || 0) };
}

// room: how wide it may be.
export function drawMap(status, gone, silent, room) {
  return status.mode === "gossip" ? peers(status) : tree(status, gone, silent, room);
}

function tree(status, gone, silent, room) {
  const clusters = status.clusters || {}, names = [...Object.keys(status.workers), ...Object.keys(gone).filter((name) => gone[name].how === "death")];
  const shown = names.slice(0, MOST), columns = Math.max(1, Math.min(shown.length, Math.floor((room - GAP) / (WIDE + GAP)))), rows = Math.ceil(shown.length / columns);
  const members = Math.max(0, ...shown.map((name) => Math.min((clusters[name]?.members || []).length, MOST_MEMBERS)));
  const width = columns * (WIDE + GAP) + GAP, top = status.above ? 20 + DEEP : 20, row = HIGH + DEEP * 0.62 + members * 15 + 6;
  const height = top + HIGH + rows * row + (names.length > shown.length ? 40 : 16);
  const svg = draw("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${shown.length} members of this server${status.above ? ", which is a cluster of a layer above" : ""}` });
  const wires = [], nodes = [], here = { x: width / 2, y: top };
  if (status.above) {
    const above = status.above, way = (above.ways || []).find((each) => each.used);
    const text = way ? [`↑ ${rate(way.up_bytes_per_s)}`, `↓ ${rate(way.down_bytes_per_s)}`, `${Math.round(way.latency_s * 1000)} ms`].join("\n") : "";
    wires.push(wire({ x: here.x, y: 20 + HIGH }, here, text, above.failure ? "bad" : "", thick(way?.up_bytes_per_s || 0)));
    nodes.push(node(here.x, 20, "layer above", [above.address, above.failure ? "out of reach" : `version ${(above.versions || []).join(", ")} · ${above.exchanges} exchanges`], above.failure ? "bad" : ""));
  }
  nodes.push(node(here.x, here.y, status.above ? status.above.cluster : "server", [`round ${status.sync_round}`, status.plan ? `H ${status.plan.sync_every} · ${status.plan.codec}` : ""], "here"));
  const places = new Map();
  shown.forEach((name, i) => {
    const inRow = Math.min(columns, shown.length - Math.floor(i / columns) * columns);
    const x = width / 2 + ((i % columns) - (inRow - 1) / 2) * (WIDE + GAP), y = top + HIGH + DEEP * 0.62 + Math.floor(i / columns) * row;
    places.set(name, { x, y });
    const worker = status.workers[name], cluster = clusters[name], isSilent = silent.has(name), { text, speed } = speeds(status.links || [], name);
    wires.push(wire({ x: here.x, y: here.y + HIGH }, { x, y }, worker ? text : "", worker ? "" : "bad", worker ? thick(speed) : 1.5));
    const size = cluster && cluster.size > 1 ? `cluster of ${cluster.size}` : cluster?.machine || worker?.hostname || "";
    const doing = worker ? (isSilent ? `silent for ${duration(worker.last_seen_s)}` : worker.state || `step ${worker.step ?? "–"}`) : "died";
    nodes.push(node(x, y, name, [doing, size], worker ? (isSilent ? "warn" : "") : "bad"));
    const inside = cluster?.members || [];
    inside.slice(0, MOST_MEMBERS).forEach((member, j) => {
      const last = j === MOST_MEMBERS - 1 && cluster.size > MOST_MEMBERS;
      nodes.push(draw("text", { x: x - WIDE / 2 + 12, y: y + HIGH + 17 + 15 * j, class: "small start" }, last ? `… ${cluster.size - j} more` : `· ${cut(member, 24)}`));
    });
  });
  for (const [source, target] of Object.entries(status.layer?.plan?.sends_to || {})) {
    const from = places.get(source), to = places.get(target);
    if (from && to) wires.push(draw("path", { class: "way", d: `M${from.x} ${from.y + HIGH}Q${(from.x + to.x) / 2} ${from.y + HIGH + 34} ${to.x} ${to.y + HIGH}` }));
  }
  svg.append(...wires, ...nodes);
  if (names.length > shown.length) svg.append(draw("text", { x: width / 2, y: height - 4, class: "small" }, `and ${names.length - shown.length} more`));
  return svg;
}

function peers(status) {
  const members = status.members.slice(0, MOST), radius = members.length > 1 ? Math.max(120, members.length * 34) : 0, width = 2 * radius + WIDE + 40, height = 2 * radius * 0.7 + HIGH + 40;
  const svg = draw("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${members.length} peers` });
  const places = members.map((_, i) => ({ x: width / 2 + radius * Math.sin((2 * Math.PI * i) / members.length), y: height / 2 - HIGH / 2 - radius * 0.7 * Math.cos((2 * Math.PI * i) / members.length) }));
  places.forEach((a, i) => places.slice(i + 1).forEach((b) => svg.append(draw("path", { class: "link", "stroke-width": 1, d: `M${a.x} ${a.y + HIGH / 2}L${b.x} ${b.y + HIGH / 2}` }))));
  members.forEach((member, i) => {
    const silent = status.silent.includes(member.peer_id);
    svg.append(node(places[i].x, places[i].y, member.peer_id, [silent ? "silent" : member.self ? "this peer" : `step ${member.step ?? "–"}`, member.address], silent ? "bad" : member.self ? "here" : ""));
  });
  return svg;
}
