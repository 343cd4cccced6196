// The page: conversations, asking, stopping, and going between views.

import { ApiError, call, events, send } from "./api.js";
import { composer } from "./composer.js";
import { announce, button, byId, el, icon, twice } from "./dom.js";
import { Keeper, owner } from "./keep.js";
import { memoryView } from "./memory.js";
import { summary } from "./report.js";
import { sampling, settings, systemPrompt } from "./settings.js";
import { Talk, lineage, messages } from "./talk.js";
import { turnElement } from "./turns.js";

const page = {
  model: "", // what the server calls its model
  samples: [], // pictures and questions to try, where a demo model is served
  talks: [],
  talk: null, // the one that is shown
  running: null, // { talk, turn, stop } while an answer comes
  views: new Map(), // turn -> its element
  editing: null, // the turn whose question is being edited, in `editor`
  editor: null,
  reading: 0, // how far the conversation was scrolled when the memory was shown
};

// -- asking ------------------------------------------------------------------------------------

/** Put a question under a turn, and have it answered; words, where it cannot be now. */
function ask(parent, said) {
  if (page.running) return "An answer is still coming: wait for it, or stop it with Escape.";
  answer(page.talk.add(parent, "user", said));
  return "";
}

async function answer(question) {
  const stop = new AbortController(), { talk } = page;
  const turn = talk.add(question, "assistant", {
    thought: "", running: true, error: null, stopped: false, open: false,
    told: { model: page.model, report: null, usage: null, timings: null, firstMs: null, reason: null },
  });
  page.running = { talk, turn, stop };
  drawTalk();
  toEnd();
  announce("The model is answering");
  try {
    await receive(turn, stop.signal);
  } catch (error) {
    if (error.name === "AbortError") turn.stopped = true;
    else turn.error = error instanceof ApiError ? error : new ApiError(`The page failed: ${error.message}`);
  }
  turn.running = false;
  page.running = null;
  keeper.soon(talk); // which may no longer be the one that is shown
  const near = nearEnd();
  drawTalk();
  if (near && page.views.has(turn)) toEnd(); // not from under somebody who reads
  if (turn.error) announce(`That did not work: ${turn.error.message}`);
  else announce(turn.stopped ? "Stopped" : `${turn.text} (${summary(turn.told)})`);
  if (document.activeElement === document.body) foot.focus();
}

async function receive(turn, signal) {
  if (!page.model) await greet();
  const { told } = turn;
  told.model = page.model;
  const body = {
    model: page.model, messages: await messages(lineage(turn.parent), systemPrompt()), ...sampling(),
    stream: true, stream_options: { include_usage: true }, keepsight: { report: true },
  };
  const begun = performance.now();
  for await (const { choices: [choice], usage, timings, keepsight } of events("v1/chat/completions", body, signal)) {
    if (signal.aborted) throw new DOMException("stopped", "AbortError");
    if (choice) {
      const { content, reasoning_content: thought } = choice.delta;
      turn.text += content ?? "";
      turn.thought += thought ?? "";
      told.reason = choice.finish_reason ?? told.reason;
      if (content || thought) told.firstMs ??= performance.now() - begun;
    } else Object.assign(told, { usage, timings, report: keepsight.report });
    drawSoon(turn);
    keeper.soon(page.running.talk);
  }
}

const stop = () => page.running?.stop.abort();

// -- what can be done with a turn ----------------------------------------------------------------

const acts = {
  settings: () => openSettings(),
  edit(turn) {
    page.editing = turn;
    page.editor = editor(turn);
    drawTalk();
    page.editor.focus();
  },
  again(turn) {
    const question = turn.parent, { children } = question;
    if (turn.error && !turn.text && !turn.children.length) children.splice(children.indexOf(turn), 1);
    answer(question);
  },
  branch(turn) {
    turn.chosen = null;
    drawTalk();
    announce("What you ask now begins another branch");
    foot.focus();
    toEnd();
  },
  step(turn, by) {
    const { children } = turn.parent, next = children[children.indexOf(turn) + by];
    turn.parent.chosen = next;
    drawTalk();
    const group = page.views.get(next).querySelector(".branches");
    announce(group.getAttribute("aria-label"));
    group.querySelector(by < 0 ? "button:enabled" : "button:last-of-type:enabled, button:enabled").focus();
  },
};

function editor(turn) {
  const close = () => {
    page.editing = null;
    drawTalk();
    page.views.get(turn)?.querySelector(".edit")?.focus();
  };
  const made = composer({
    label: "Edit the question", send: "Ask again", text: turn.text, pictures: turn.pictures, model: () => page.model, onCancel: close,
    onSend(said) {
      if (!page.running) page.editing = null;
      const trouble = ask(turn.parent, said);
      if (!trouble) foot.focus();
      return trouble;
    },
  });
  made.look();
  return { ...made, room: el("article", { class: "turn user editing" }, made.element) };
}

// -- drawing -------------------------------------------------------------------------------------

/** The conversation anew; an editor keeps what was typed so far. */
function drawTalk() {
  const turns = page.talk.path(), last = turns.at(-1);
  page.views = new Map(turns.map((turn) => [turn, drawn(turn)]));
  byId("talk").replaceChildren(...page.views.values());
  byId("welcome").hidden = turns.length > 0;
  foot.busy(page.running !== null);
  if (!page.running && last?.role === "assistant" && last.children.length) {
    foot.advise("Your next question begins a new branch here; what followed is kept.",
      button("Back to it", () => ((last.chosen = last.children.at(-1)), drawTalk(), foot.focus())));
  } else foot.advise("", ...(turns.length && !page.running ? page.samples.map(({ question }) => button(question, () => foot.send(question))) : []));
  drawTalks();
  keeper.soon(page.talk);
}

function drawn(turn) {
  return page.editing === turn ? page.editor.room : turnElement(turn, page.talks, acts, page.running !== null);
}

let due = 0;

/** Draw a turn that grows, at most once a frame. */
function drawSoon(turn) {
  due ||= requestAnimationFrame(() => {
    due = 0;
    const old = page.views.get(turn);
    if (!turn.running || !old?.isConnected) return;
    const near = nearEnd(), fresh = drawn(turn);
    old.replaceWith(fresh);
    page.views.set(turn, fresh);
    if (near) toEnd();
  });
}

const nearEnd = () => !byId("talk-view").hidden && innerHeight + scrollY > document.documentElement.scrollHeight - 160;
const toEnd = () => scrollTo({ top: document.documentElement.scrollHeight });

function drawTalks() {
  const said = page.talks.filter((talk) => talk.root.children.length).sort((a, b) => b.at - a.at);
  byId("talks").replaceChildren(...said.map((talk) => {
    const title = talk.title(), when = new Date(talk.at).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
    const remove = button(`Delete the conversation: ${title}`, () => twice(remove, () => removeTalk(talk)), { icon: "trash" });
    return el("li", {}, button(title, () => goTo(talk), { title: `${title}, ${when}`, "aria-current": talk === page.talk ? "true" : null, "data-closes": "" }), remove);
  }));
  for (const id of ["save-markdown", "save-keep"]) byId(id).disabled = !page.talk.root.children.length;
}

async function removeTalk(talk) {
  if (page.running?.talk === talk) stop();
  page.talks = page.talks.filter((one) => one !== talk);
  if (talk === page.talk) newTalk();
  else drawTalks();
  byId("new-talk").focus();
  announce("The conversation is deleted");
  await keeper.remove(talk);
}

function goTo(talk) {
  stop();
  page.talk = talk;
  page.editing = null;
  keeper.show(talk);
  show(false);
  drawTalk();
  toEnd();
  foot.focus();
}

/** An empty conversation, beside those that are there. */
function newTalk() {
  const talk = page.talks.find((one) => !one.root.children.length) ?? new Talk(owner());
  if (!page.talks.includes(talk)) page.talks.push(talk);
  goTo(talk);
}

function show(memory) {
  const talk = byId("talk-view"), turned = talk.hidden !== memory;
  if (memory && turned) page.reading = scrollY;
  talk.hidden = memory;
  byId("memory-view").hidden = !memory;
  byId("show-talk").setAttribute("aria-pressed", String(!memory));
  byId("show-memory").setAttribute("aria-pressed", String(memory));
  if (memory) drawMemory();
  if (turned) scrollTo({ top: memory ? 0 : page.reading });
}

// -- the server ----------------------------------------------------------------------------------

/** Ask for the model's name. */
async function greet() {
  const { data } = await call("v1/models");
  page.model = data[0].id;
  byId("model").textContent = page.model;
  byId("served").textContent = `served here: ${page.model}`;
  byId("notice").hidden = true;
  foot.look();
}

async function begin() {
  try {
    await greet();
  } catch (error) {
    if (error.status === 401) warn("This server asks for an API key.", button("Give an API key", openSettings));
    else warn(error.message, button("Try again", begin));
  }
}

/** Say at the top what does not work, and what to do. */
function warn(words, way = button("Close", () => ((byId("notice").hidden = true), foot.focus()))) {
  byId("notice").hidden = false;
  byId("notice").replaceChildren(el("span", { text: words }), way);
}

/** Bring back what this browser keeps: the conversations of the key, and the one shown here. */
async function bringBack() {
  const kept = await keeper.all(), shown = page.talk;
  // A question that was refused without a key goes on under the key that was given for it.
  const stays = shown.owner === owner() || shown.turns().every((turn) => !turn.told?.usage);
  if (stays) shown.owner = owner();
  page.talks = [...kept.filter((talk) => talk.id !== shown.id), ...(stays ? [shown] : [])];
  const last = kept.find((talk) => talk.id === keeper.last);
  keeper.last = null;
  if (last && !shown.root.children.length) goTo(last);
  else if (!stays) newTalk();
  else drawTalks();
}

/** Pictures and questions to try: a click brings the pictures and asks. */
async function offer() {
  page.samples = await call("page/samples.json").catch(() => []);
  byId("samples").replaceChildren(...page.samples.map(({ question, pictures }) => {
    const drawings = pictures.map((name) => el("img", { src: `page/${name}`, alt: "", class: "thumb" }));
    const tried = button("", async () => {
      const files = pictures.map(async (name) => new File([await (await send(`page/${name}`)).blob()], name, { type: "image/png" }));
      await foot.add(await Promise.all(files));
      foot.send(question);
    });
    tried.append(...drawings, el("span", { text: question }));
    return el("li", {}, tried);
  }));
}

// -- a conversation as a file ----------------------------------------------------------------------

function save(blob, ending) {
  const name = page.talk.title().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "").slice(0, 60) || "conversation";
  const link = el("a", { href: URL.createObjectURL(blob), download: `${name}.${ending}` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
  announce(`Saved as ${link.download}`);
}

/** What the server remembers of it, with features and states: what is not there yet is computed. */
async function saveKeep() {
  announce("Asking the server for the file");
  try {
    save(await (await send("v1/cache/save", { model: page.model, messages: await messages(page.talk.path(), systemPrompt()) })).blob(), "keep");
  } catch (error) {
    warn(error.message);
  }
}

// -- bringing it together ------------------------------------------------------------------------

const keeper = new Keeper(warn);
const openSettings = settings({ onKey: () => (bringBack(), begin()), onKeep: (on) => keeper.turn(on, page.talks) });
const drawMemory = memoryView(byId("memory-view"), {
  model: () => page.model,
  answers: () => page.talks.flatMap((talk) => talk.turns()).filter((turn) => turn.told?.usage).sort((a, b) => a.at - b.at)
    .map(({ told: { usage } }) => ({ prompt: usage.prompt_tokens, cached: usage.prompt_tokens_details.cached_tokens })),
});
let drafting = 0;
const foot = composer({
  id: "question", label: "Your question", send: "Ask", placeholder: "Ask about a picture",
  model: () => page.model, onSend: (said) => ask(page.talk.path().at(-1) ?? page.talk.root, said), onStop: stop,
  onChange() {
    clearTimeout(drafting);
    drafting = setTimeout(() => keeper.writeDraft(foot.contents()), 300);
  },
});

/** Files go to the question that is being written. */
function bring(event, { files }) {
  if (!files.length || byId("settings").open) return;
  event.preventDefault();
  show(false);
  (page.editing ? page.editor : foot).add(files);
}

const sideIsOver = () => byId("side").matches(":popover-open"); // the page, where that is narrow

function listen() {
  const click = (id, act) => byId(id).addEventListener("click", act);
  click("show-talk", () => show(false));
  click("show-memory", () => show(true));
  click("new-talk", newTalk);
  click("save-markdown", () => save(new Blob([page.talk.markdown()], { type: "text/markdown" }), "md"));
  click("save-keep", saveKeep);
  click("open-settings", openSettings);
  byId("side").addEventListener("click", (event) => {
    if (event.target.closest("[data-closes]") && sideIsOver()) byId("side").hidePopover();
  }, true); // before what it opens takes the focus, to give it back to the menu
  new ResizeObserver(([{ target }]) => {
    document.documentElement.style.setProperty("--foot", `${target.offsetHeight}px`); // see scroll-margin
  }).observe(byId("foot"));
  addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !byId("settings").open && !sideIsOver()) stop();
  });
  addEventListener("paste", (event) => bring(event, event.clipboardData));
  addEventListener("dragover", (event) => {
    if (!event.dataTransfer.types.includes("Files")) return;
    event.preventDefault();
    byId("drop").hidden = false;
  });
  addEventListener("dragleave", (event) => (byId("drop").hidden ||= event.relatedTarget === null));
  addEventListener("drop", (event) => ((byId("drop").hidden = true), bring(event, event.dataTransfer)));
}

async function start() {
  for (const one of document.querySelectorAll("[data-icon]")) one.prepend(icon(one.dataset.icon));
  byId("foot").append(foot.element);
  listen();
  newTalk();
  begin();
  offer();
  await bringBack();
  const draft = await keeper.draft();
  if (draft) foot.restore(draft);
}

start();
