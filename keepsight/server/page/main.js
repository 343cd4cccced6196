// The page: conversations, asking, stopping, and going between views.

import { ApiError, call, events } from "./api.js";
import { composer } from "./composer.js";
import { announce, button, byId, el, twice } from "./dom.js";
import { saveKeep, saveMarkdown } from "./download.js";
import { Keeper, owner } from "./keeping.js";
import { memoryView } from "./memory.js";
import { menuOf } from "./menu.js";
import { Picture } from "./pictures.js";
import { samples } from "./samples.js";
import { sampling, settings, systemPrompt } from "./settings.js";
import { summary } from "./report.js";
import { Talk, lineage, messages } from "./talk.js";
import { turnElement } from "./turns.js";

const page = {
  model: "", // what the server calls its model
  talks: [],
  talk: null,
  running: null, // { talk, turn, stop } while an answer comes
  answers: [], // what each answer of this page remembered, for the chart
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
    thought: "", running: true, waiting: "Looking…", error: null, stopped: false, open: false,
    told: { model: page.model, report: null, usage: null, timings: null, firstMs: null, reason: null },
  });
  page.running = { talk, turn, stop };
  drawTalk();
  toEnd();
  if (document.activeElement === document.body) foot.focus();
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
  finish(turn);
}

async function receive(turn, signal) {
  if (!page.model) await greet();
  turn.told.model = page.model;
  const body = {
    model: page.model,
    messages: await messages(lineage(turn.parent), systemPrompt()),
    stream: true,
    stream_options: { include_usage: true },
    keepsight: { report: true },
    ...sampling(),
  };
  const begun = performance.now();
  for await (const chunk of events("v1/chat/completions", body, signal)) {
    if (signal.aborted) throw new DOMException("stopped", "AbortError");
    if (take(turn, chunk)) turn.told.firstMs ??= performance.now() - begun;
    drawSoon(turn);
    keeper.soon(page.running.talk);
  }
}

/** Note what a chunk says; whether it said something of the answer. */
function take(turn, chunk) {
  const [choice] = chunk.choices;
  if (choice === undefined) {
    turn.told.usage = chunk.usage;
    turn.told.timings = chunk.timings;
    turn.told.report = chunk.keepsight.report;
    return false;
  }
  turn.text += choice.delta.content ?? "";
  turn.thought += choice.delta.reasoning_content ?? "";
  turn.told.reason = choice.finish_reason ?? turn.told.reason;
  return Boolean(choice.delta.content || choice.delta.reasoning_content);
}

function finish(turn) {
  const { usage } = turn.told;
  if (usage) page.answers.push({ prompt: usage.prompt_tokens, cached: usage.prompt_tokens_details.cached_tokens });
  const near = nearEnd();
  drawTalk();
  if (near && page.views.has(turn)) toEnd(); // not from under somebody who reads
  if (turn.error) announce(`That did not work: ${turn.error.message}`);
  else announce(turn.stopped ? "Stopped" : `${turn.text} (${summary(turn.told)})`);
  if (document.activeElement === document.body) foot.focus();
}

function stop() {
  page.running?.stop.abort();
}

// -- what can be done with a turn ----------------------------------------------------------------

const acts = {
  settings: () => dialog.open(),
  edit(turn) {
    page.editing = turn;
    page.editor = editor(turn);
    drawTalk();
    page.editor.focus();
  },
  regenerate(turn) {
    if (page.running) return;
    const question = turn.parent;
    if (turn.error && !turn.text && !turn.children.length) page.talk.remove(turn);
    answer(question);
  },
  branch(turn) {
    page.talk.endAt(turn);
    drawTalk();
    announce("What you ask now begins another branch");
    foot.focus();
    toEnd();
  },
  back(turn) {
    turn.chosen = turn.children.at(-1);
    drawTalk();
    foot.focus();
  },
  step(turn, by) {
    page.talk.step(turn, by);
    drawTalk();
    const [place, count] = page.talk.place(turn.parent.chosen);
    announce(`Branch ${place} of ${count}`);
    const group = page.views.get(turn.parent.chosen).querySelector(".branches");
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
    label: "Edit the question", send: "Ask again", text: turn.text, pictures: turn.pictures,
    model: () => page.model, onCancel: close,
    onSend(said) {
      if (!page.running) page.editing = null;
      const trouble = ask(turn.parent, said);
      if (!trouble) foot.focus();
      return trouble;
    },
  });
  made.lookAgain(true);
  return { ...made, element: el("article", { class: "turn user editing" }, made.form) };
}

// -- drawing -------------------------------------------------------------------------------------

/** The conversation anew; what has focus in an element that stays keeps it. */
function drawTalk() {
  const turns = page.talk.path();
  page.views = new Map(turns.map((turn) => [turn, drawn(turn)]));
  byId("talk").replaceChildren(...page.views.values());
  byId("welcome").hidden = turns.length > 0;
  foot.busy(page.running !== null);
  adviseNext(turns.at(-1));
  drawTalks();
  keeper.soon(page.talk);
}

/** Where a conversation was cut to begin a branch: what to do next, and the way back. */
function adviseNext(last) {
  if (page.running || last?.role !== "assistant" || last.chosen || !last.children.length) return foot.advise("");
  foot.advise("Your next question begins a new branch here; what followed is kept.",
    button("Back to it", () => acts.back(last)));
}

function drawn(turn) {
  if (page.editing === turn) return page.editor.element; // with what was typed so far
  return turnElement(turn, page.talk, acts, page.running !== null);
}

let due = 0;

/** Draw a turn that grows, at most once a frame. */
function drawSoon(turn) {
  due ||= requestAnimationFrame(() => {
    due = 0;
    const old = page.views.get(turn);
    if (!turn.running || !old?.isConnected) return;
    const near = nearEnd();
    const fresh = drawn(turn);
    old.replaceWith(fresh);
    page.views.set(turn, fresh);
    if (near) toEnd();
  });
}

const nearEnd = () => !byId("talk-view").hidden && innerHeight + scrollY > document.documentElement.scrollHeight - 160;

function toEnd() {
  scrollTo({ top: document.documentElement.scrollHeight });
}

function drawTalks() {
  const said = page.talks.filter((talk) => talk.kept || talk.root.children.length).sort((a, b) => b.at - a.at);
  byId("talks").replaceChildren(...said.map(talkRow));
  byId("talks-field").hidden = !said.length;
  for (const id of ["save-markdown", "save-keep"]) byId(id).disabled = !page.talk.root.children.length;
}

function talkRow(talk) {
  const title = talk.title(), when = new Date(talk.at);
  const go = button(title, () => goTo(talk), { class: "talk-title", "aria-current": talk === page.talk ? "true" : null, "data-closes": "" });
  go.append(el("span", { class: "when", "aria-hidden": "true", text: when.toLocaleString([], { dateStyle: "medium", timeStyle: "short" }) }));
  const remove = button("Delete", () => twice(remove, () => removeTalk(talk)), { "aria-label": `Delete the conversation: ${title}` });
  return el("li", {}, go, remove);
}

async function removeTalk(talk) {
  page.talks = page.talks.filter((one) => one !== talk);
  if (talk === page.talk) {
    if (page.running) stop();
    page.talk = null;
    newTalk();
  } else drawTalks();
  byId("menu").querySelector("button:not(:disabled)").focus();
  announce("The conversation is deleted");
  await keeper.remove(talk);
}

/** Show another conversation. */
async function goTo(talk) {
  if (page.running) stop();
  await keeper.read(talk);
  page.talk = talk;
  page.editing = null;
  keeper.show(talk);
  show(false);
  drawTalk();
  toEnd();
  foot.focus();
}

function show(memory) {
  const talk = byId("talk-view");
  if (memory && !talk.hidden) page.reading = scrollY;
  const back = !memory && talk.hidden;
  talk.hidden = memory;
  byId("memory-view").hidden = !memory;
  byId("show-talk").setAttribute("aria-pressed", String(!memory));
  byId("show-memory").setAttribute("aria-pressed", String(memory));
  if (memory) memoryRoom.draw();
  if (memory || back) scrollTo({ top: memory ? 0 : page.reading });
}

function newTalk() {
  if (!page.talk || page.talk.root.children.length) {
    page.talk = new Talk(owner());
    page.talks.push(page.talk);
    keeper.show(page.talk);
  }
  page.editing = null;
  drawTalk();
}

// -- the server ----------------------------------------------------------------------------------

/** Ask for the model's name; what is in the way is said at the top. */
async function greet() {
  const { data } = await call("v1/models");
  page.model = data[0].id;
  byId("model").textContent = page.model;
  byId("served").textContent = `served here: ${page.model}`;
  notice(null);
  foot.lookAgain();
  byId("samples").replaceChildren(...(await samples(page.model, (file, text) =>
    ask(page.talk.leaf(), { text, pictures: [new Picture(file)] }))));
}

async function begin() {
  try {
    await greet();
  } catch (error) {
    notice(error);
  }
}

/** Bring back what this browser keeps: the conversations of the key, and the one shown here. */
async function bringBack() {
  const { talks, shown } = await keeper.all();
  const unanswered = page.talk.turns().every((turn) => !turn.told?.usage);
  if (unanswered) page.talk.owner = owner(); // such as a question that was refused without a key
  else if (page.talk.owner !== owner()) page.talk = null;
  page.talks = talks.filter((talk) => talk.id !== page.talk?.id);
  if (page.talk) page.talks.push(page.talk);
  if (shown && page.talk && !page.talk.root.children.length) return goTo(shown);
  if (!page.talk) newTalk();
  drawTalks();
}

function notice(error) {
  const room = byId("notice");
  room.hidden = error === null;
  if (error === null) return;
  const needsKey = error.status === 401;
  const again = needsKey ? button("Give an API key", () => dialog.open()) : button("Try again", begin);
  room.replaceChildren(el("span", { text: needsKey ? "This server asks for an API key." : error.message }), again);
}

/** Something that did not work, and that asking the server again would not mend. */
function warn(words) {
  const room = byId("notice");
  room.hidden = false;
  room.replaceChildren(el("span", { text: words }), button("Close", () => (notice(null), foot.focus())));
}

// -- bringing it together ------------------------------------------------------------------------

const keeper = new Keeper(warn);
const dialog = settings({ onKey: () => (bringBack(), begin()), onKeep: (on) => keeper.turn(on, page.talks) });
const memoryRoom = memoryView(byId("memory-view"), {
  model: () => page.model,
  answers: () => page.answers,
});
let drafting = 0;
const foot = composer({
  id: "question", label: "Your question", send: "Ask", placeholder: "Ask about a picture",
  model: () => page.model, onSend: (said) => ask(page.talk.leaf(), said), onStop: stop,
  onChange: () => {
    clearTimeout(drafting);
    drafting = setTimeout(() => keeper.writeDraft(foot.contents()), 300);
  },
});
const menu = menuOf(byId("open-menu"), byId("menu"));

function listen() {
  byId("foot").append(foot.form);
  byId("show-talk").addEventListener("click", () => show(false));
  byId("show-memory").addEventListener("click", () => show(true));
  byId("save-markdown").addEventListener("click", () => saveMarkdown(page.talk));
  byId("save-keep").addEventListener("click", () => saveKeep(page.talk, page.model).catch((error) => warn(error.message)));
  byId("new-talk").addEventListener("click", () => {
    if (page.running) stop();
    show(false);
    newTalk();
    foot.focus();
  });
  new ResizeObserver(([{ target }]) => {
    document.documentElement.style.setProperty("--foot", `${target.offsetHeight}px`); // see scroll-margin
  }).observe(byId("foot"));
  addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !event.defaultPrevented && !byId("settings").open) stop();
  });
  addEventListener("paste", (event) => {
    const { files } = event.clipboardData;
    if (event.defaultPrevented || !files.length || byId("settings").open) return;
    event.preventDefault();
    bring(files);
  });
  dropping();
}

/** Files for the question that is being written. */
function bring(files) {
  show(false);
  (page.editing ? page.editor : foot).add(files);
}

/** Files dropped anywhere go to the question that is being written. */
function dropping() {
  const veil = byId("drop");
  const brings = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
  addEventListener("dragover", (event) => {
    if (!brings(event)) return;
    event.preventDefault();
    veil.hidden = false;
  });
  addEventListener("dragleave", (event) => {
    if (event.relatedTarget === null) veil.hidden = true;
  });
  addEventListener("drop", (event) => {
    veil.hidden = true;
    if (!brings(event)) return;
    event.preventDefault();
    bring(event.dataTransfer.files);
  });
}

async function start() {
  listen();
  newTalk();
  begin();
  foot.focus();
  await bringBack();
  const draft = await keeper.draft();
  if (draft) foot.restore(draft);
}

start();
