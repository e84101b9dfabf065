// How numbers, times and events are written. Names come from workers: they are only ever put into text nodes.

const SIZES = ["B", "kB", "MB", "GB", "TB", "PB"];

export function size(bytes) {
  let value = Number(bytes) || 0, unit = 0;
  while (value >= 1000 && unit < SIZES.length - 1) { value /= 1000; unit += 1; }
  return `${unit && value < 100 ? value.toPrecision(2 + (value >= 10)) : Math.round(value)} ${SIZES[unit]}`;
}

export const rate = (bytes) => `${size(bytes)}/s`;

export function count(value) {
  if (value === null || value === undefined) return "–";
  return Number(value).toLocaleString("en", { maximumFractionDigits: 0 });
}

export function short(value, digits = 4) {
  if (value === null || value === undefined || !Number.isFinite(Number(value))) return "–";
  const number = Number(value);
  return number !== 0 && (Math.abs(number) >= 1e5 || Math.abs(number) < 1e-3) ? number.toExponential(2) : String(Number(number.toPrecision(digits)));
}

export function duration(seconds) {
  const whole = Math.max(0, Math.round(Number(seconds) || 0));
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

// Where there is little room.
export const brief = (seconds) => (seconds >= 600 && seconds < 3600 ? `${Math.floor(seconds / 60)} min` : duration(seconds));
export const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString("en-GB");
export const percent = (share) => (share === null || share === undefined ? "–" : `${Math.round(share * 100)} %`);
export const list = (names, most = 6) => (names.length > most ? `${names.slice(0, most).join(", ")} and ${names.length - most} more` : names.join(", "));

// A number and its unit stay on one line.
export const whole = (text) => text.replaceAll(" ", "\u00a0");

const plain = (value) => (typeof value === "object" ? JSON.stringify(value) : value);
const why = (reason) => (reason ? `: ${reason}` : "");
const changes = (made) => Object.entries(made || {}).map(([name, text]) => `${name} ${plain(text)}`).join(", ");

// kind → [how it looks, the sentence]
const SENTENCES = {
  server: (e) => ["", `the server ${e.resumed ? "resumes" : "starts"} run ${e.run_id} at round ${e.round}`],
  start: (e) => ["good", `the first round begins with ${list(e.workers || [])}`],
  join: (e) => ["good", `${e.worker} joined${e.host ? ` from ${e.host}` : ""}`],
  leave: (e) => ["", `${e.worker} left${why(e.reason)}`],
  death: (e) => ["bad", `${e.worker} died: nothing was heard from it for ${duration(e.silent_s)}`],
  kick: (e) => ["bad", `${e.worker} was removed${why(e.reason)}`],
  expelled: (e) => ["bad", `${e.worker} was expelled: it is proven to have lied, or is no longer invited`],
  quarantine: (e) => ["bad", `${e.worker} is in quarantine for ${duration(e.seconds)}${why(e.reason)}`],
  offence: (e) => ["warn", `${e.worker}: offence ${e.count} (${e.code})`],
  pardon: (e) => ["good", `${e.worker} was pardoned`],
  left_out: (e) => ["warn", `a contribution of ${e.worker} was left out of version ${e.version}${why(e.why || (e.times_usual ? `${short(e.times_usual, 3)} times the usual size` : ""))}`],
  counted_out: (e) => ["warn", `version ${e.version} no longer waits for ${e.worker}${why(e.why)}`],
  claim_bounded: (e) => ["warn", `${e.worker} claims ${count(e.claimed)} tokens; ${count(e.counted)} are counted`],
  zeros: (e) => ["warn", `${e.worker} has trained ${e.steps} steps and learned nothing: ${e.why}`],
  not_chosen: (e) => ["", `${e.aggregation} did not choose ${list(e.workers || [])} for version ${e.version}`],
  too_few: (e) => ["warn", `version ${e.version} has no contribution in it: ${e.trained} trained, ${e.aggregation} needs ${e.needed}`],
  plan: (e) => ["", `plan ${e.revision}: ${Object.entries(e).filter(([k]) => !["time", "kind", "revision"].includes(k)).map(([k, v]) => `${k} ${plain(v)}`).join(", ")}`],
  plan_decided: (e) => ["", `the controller, at round ${e.from_round}: ${changes(e.changes) || "no change"}${why(e.reason)}`],
  budget_spent: (e) => ["good", `the token budget is spent: ${count(e.tokens)}`],
  drain: (e) => ["", `${list(e.workers || [])} will contribute and leave${why(e.reason)}`],
  sync: (e) => ["", `${list(e.workers || [])} will contribute at the next step`],
  control: (e) => ["", `an operator says ${e.command}${e.worker ? ` ${e.worker}` : ""}${why(e.reason)}`],
  save: (e) => ["", `saved round ${e.round} to ${e.path}`],
  save_failed: (e) => ["bad", `saving failed: ${e.why}`],
  device_left: (e) => ["warn", `the server leaves ${e.device} and works on the CPU: ${e.why}`],
  disk_fails: (e) => ["bad", `the disk fails, and rounds wait: ${e.why}`],
  disk_works: () => ["good", "the disk works again"],
  ended: (e) => ["good", `all workers have left after round ${e.round}${e.loss === null || e.loss === undefined ? "" : `, last loss ${short(e.loss)}`}`],
  stop: (e) => ["warn", `the server stops at round ${e.round}`],
  peer_stopped: (e) => ["bad", `this peer has stopped: ${e.why}`],
};
export const SPOKEN = new Set(["start", "join", "leave", "death", "kick", "expelled", "quarantine", "device_left", "disk_fails", "disk_works", "save_failed", "ended", "stop", "budget_spent"]);

export function sentence(event) {
  const made = SENTENCES[event.kind];
  if (made) return made(event);
  const rest = Object.entries(event).filter(([name]) => name !== "time" && name !== "kind");
  return ["", [event.kind, ...rest.map(([name, value]) => `${name} ${plain(value)}`)].join(" · ")];
}

// What is kept by the names of workers. A plain object has things that nobody put there: a worker may be called "constructor".
export const named = (entries) => Object.assign(Object.create(null), Object.fromEntries(entries));
export const parse = (text) => JSON.parse(text, (_, value) => (value && typeof value === "object" && !Array.isArray(value) ? named(Object.entries(value)) : value));

// An element with text and attributes. There is no way here to pass markup.
export function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    made.setAttribute(name, value === true ? "" : String(value));
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export function write(element, text) {
  const wanted = String(text);
  if (element.textContent !== wanted) element.textContent = wanted;
}
