"use strict";
// The view of a turn: a message, an answer, or a completed text.

class TurnView {
  constructor(conversation, turn) {
    Object.assign(this, { conversation, turn });
    const mine = turn.role === "user";
    this.element = make("article", { class: `turn ${mine ? "mine" : "answer"}`, "aria-label": mine ? "You" : "The model" });
    this.body = make("div", { class: "text" });
    this.problem = make("p", { class: "problem" });
    this.numbers = make("div", { class: "numbers" });
    this.actions = make("div", { class: "actions" });
    this.element.append(this.body, this.problem, make("div", { class: "foot" }, this.actions, this.numbers));
    if (mine) {
      this.body.classList.add("plain");
    } else if (conversation.mode === "chat") {
      this.markdown = new Markdown(this.body, (text) => { if (turn === spoken) hear(text); });
    } else {
      this.body.classList.add("plain", "mono");
      this.body.append(make("span", { class: "given" }, this.given.text), "");
    }
    this.element.style.containIntrinsicBlockSize = `auto ${heightOf(turn.text)}rem`;
    this.update();
  }

  /** Announces the rest of a finished answer to screen readers. */
  end() {
    if (this.markdown) this.markdown.end();
    else if (this.turn === spoken) hear(this.turn.text);
  }

  get given() { return this.conversation.turn(this.turn.parent); }

  get answering() {
    const found = running.get(this.conversation.id);
    return found?.turn === this.turn ? found : null;
  }

  /** Shows the turn's current content. */
  update() {
    const { turn } = this;
    if (this.markdown) this.markdown.show(turn.text);
    else if (turn.role === "user") this.showMessage();
    else this.body.lastChild.data = turn.text;
    if (turn.thought) this.showThought();
    const busy = Boolean(this.answering);
    this.element.classList.toggle("busy", busy);
    this.body.hidden = !this.body.textContent && this.body.childElementCount === 0;
    const problem = turn.problem || (this.isBlank ? "The model ended its answer at once." : "");
    if (this.problem.textContent !== problem) this.problem.textContent = problem;
    this.problem.hidden = !problem;
    this.numbers.textContent = turn.role === "user" ? "" : sentenceOf(turn, this.answering);
    this.showActions();
  }

  /** Shows the text of a message, with its attached files folded. */
  showMessage() {
    if (this.shown === this.turn.text) return;
    this.shown = this.turn.text;
    this.body.replaceChildren(...messageNodes(this.turn.text));
  }

  get isBlank() {
    const { role, text, thought, end } = this.turn;
    return role === "assistant" && !text && !thought && ["stop", "length"].includes(end) && !this.answering;
  }

  showThought() {
    const { thought, text } = this.turn;
    if (!this.thought) {
      const details = make("details", { class: "thought" }, make("summary"), make("div", { class: "text plain" }, ""));
      this.element.prepend(details);
      this.thought = details;
    }
    const [summary, body] = this.thought.children;
    const label = this.answering && !text ? "Thinking…" : "Thinking";
    if (summary.textContent !== label) summary.textContent = label;
    const shown = body.firstChild;
    if (thought.startsWith(shown.data)) shown.appendData(thought.slice(shown.data.length));
    else shown.data = thought;
  }

  /** Shows the buttons. One may have the focus, so they are replaced only if they change. */
  showActions() {
    const { conversation, turn } = this;
    const free = !running.has(conversation.id);
    const alike = conversation.versions(turn);
    const place = alike.indexOf(turn);
    const last = conversation.leaf === turn.id;
    const goesOn = last && turn.text && !["stop", undefined].includes(turn.end);
    const state = JSON.stringify([free, Boolean(this.answering), place, alike.length, last, goesOn]);
    if (state === this.state) return;
    this.state = state;
    this.actions.replaceChildren();
    if (this.answering) return;
    if (free && alike.length > 1) this.actions.append(...this.branches(alike, place));
    const copied = iconButton("copy", "Copy", () => copy(turn.text, copied));
    this.actions.append(copied);
    if (!free) return;
    const whole = conversation.mode === "chat";
    if (turn.role === "assistant") this.actions.append(iconButton("again", "Regenerate", () => regenerate(turn)));
    this.actions.append(iconButton("pencil", whole ? "Edit" : "Edit the text", () => this.edit()));
    if (goesOn) this.actions.append(iconButton("forth", "Go on", () => goOn(turn)));
  }

  branches(alike, place) {
    const step = (label, name, other) => {
      const button = iconButton(name, label, () => showBranch(other));
      button.disabled = !other;
      return button;
    };
    const count = make("span", { class: "count" }, `${place + 1}/${alike.length}`);
    return [step("Previous version", "left", alike[place - 1]), count, step("Next version", "right", alike[place + 1])];
  }

  /** Replaces the text by an edit field. `text`: the field's initial value, if not the text. */
  edit(text = null) {
    if (this.element.classList.contains("edited")) return;
    const { conversation, turn } = this;
    const changed = conversation.mode === "complete" ? this.given : turn;  // the edited turn
    const whole = changed === turn ? turn.text : changed.text + turn.text;
    const sends = changed.role === "user";
    const field = make("textarea", { "aria-label": "Edited text", rows: 1 });
    const cancel = make("button", { type: "button" }, "Cancel");
    const done = make("button", { type: "button", class: "main" }, sends ? "Send" : "Save");
    const editor = make("div", { class: "editor" }, field, make("div", { class: "row" }, cancel, done));
    const end = () => { editor.remove(); this.element.classList.remove("edited"); toPrompt(); };
    cancel.addEventListener("click", end);
    done.addEventListener("click", () => {
      if (!field.value.trim() || running.has(conversation.id)) return;
      end();
      if (sends) resend(changed, field.value);
      else replace(turn, field.value);
    });
    field.addEventListener("input", () => fit(field));
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { event.stopPropagation(); end(); }
      if (sendsNow(event, conversation.mode)) { event.preventDefault(); done.click(); }
    });
    field.value = text ?? whole;
    this.element.classList.add("edited");
    this.element.prepend(editor);
    fit(field);
    field.focus();
  }
}

/** Estimates the height of a turn that has not been in sight yet, in rem. */
function heightOf(text) {
  return text.split("\n").reduce((sum, line) => sum + 1.6 * Math.max(0.5, Math.ceil(line.length / 90)), 3);
}

let spoken = null;  // the turn that is announced to screen readers

/** Announces a piece of the answer in progress to screen readers. */
function hear(text) { if (text.trim()) $("live").append(make("p", {}, text)); }

/** Sets a field's height to that of its text. */
function fit(field) {
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight + 2}px`;
}

const touch = matchMedia("(hover: none) and (pointer: coarse)");

/** True if a key event sends: Enter in a chat without touch screen; Ctrl+Enter or Cmd+Enter always. */
function sendsNow(event, mode) {
  if (event.key !== "Enter" || event.isComposing || event.keyCode === 229) return false;
  if (event.ctrlKey || event.metaKey) return true;
  return mode === "chat" && !event.shiftKey && !event.altKey && !touch.matches;
}
