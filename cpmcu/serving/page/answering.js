"use strict";
// One answer in progress: writes the server's stream into a turn and saves the turn meanwhile.

const running = new Map();  // id of a conversation -> its Answering
const SAVE_EVERY = 500;     // ms
let leaving = false;        // true while the page is being closed or reloaded

class Answering {
  /** `changed` is called when the turn's content has changed. */
  constructor(conversation, turn, changed) {
    Object.assign(this, { conversation, turn, changed });
    this.controller = new AbortController();
    this.tokensBefore = turn.numbers?.tokens ?? 0;  // tokens of the part that "Go on" continues
    this.came = false;     // true once a token has arrived
    this.progress = "";    // text shown during prefill
    this.refusal = null;
  }

  stop() { this.controller.abort(); }

  /** Runs until the answer ends. An error becomes the turn's `problem`, or `refusal` if no token arrived. */
  async run() {
    const { conversation, turn } = this;
    const before = { ...turn };
    running.set(conversation.id, this);
    Object.assign(turn, { end: "running", problem: "", model: model.name });
    this.started = performance.now();
    this.save();
    this.changed();
    try {
      const reply = await ask(...request(conversation, turn), this.controller.signal);
      for await (const event of events(reply)) this.take(event);
      if (turn.end === "running") turn.end = "stop";
    } catch (error) {
      if (leaving) return;  // the browser has closed the stream
      if (error.name === "AbortError") turn.end = "stopped";
      else if (!(error instanceof Refusal)) throw error;
      else if (this.came) Object.assign(turn, { end: "failed", problem: error.message });
      else {
        Object.assign(turn, { ...before, end: before.end ?? "failed", problem: before.problem ?? "" });
        this.refusal = error;
      }
    } finally {
      clearTimeout(this.timer);
      this.timer = 0;
      running.delete(conversation.id);
    }
    this.changed();
  }

  take({ choices: [choice], usage, metrics, prompt_progress: progress }) {
    const { turn } = this;
    if (progress) this.progress = `reading the prompt: ${progress.processed} of ${progress.total} tokens`;
    if (usage?.completion_tokens) this.count(usage);
    if (metrics) {
      turn.numbers ??= {};
      turn.numbers.speed = metrics.timings.predicted_per_second || turn.numbers.speed;
      turn.numbers.accepted = metrics.speculative_decoding?.mean_acceptance_length;
    }
    if (choice) {
      turn.text += choice.text ?? choice.delta?.content ?? "";
      turn.thought = (turn.thought ?? "") + (choice.delta?.reasoning_content ?? "");
      if (choice.finish_reason) turn.end = choice.finish_reason;
      this.timer ||= setTimeout(() => { this.timer = 0; this.save(); }, SAVE_EVERY);
    }
    this.changed();
  }

  count({ completion_tokens: tokens, prompt_tokens: before }) {
    const now = performance.now();
    this.came = true;
    this.first ??= { at: now, tokens };
    const seconds = (now - this.first.at) / 1000;
    this.turn.numbers = {
      tokens: this.tokensBefore + tokens,
      speed: seconds > 0 ? (tokens - this.first.tokens) / seconds : 0,
      wait: this.first.at - this.started,
      context: before + tokens,
    };
  }

  save() {
    this.conversation.updated = Date.now();
    if (chats.save(this.conversation)) showList();
  }
}

/** Returns [path, body] of the request for a turn's text, or for its continuation. */
function request(conversation, turn) {
  const body = {
    stream: true, return_metrics: true, return_progress: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    ...sampling(conversation),
  };
  const path = conversation.path(conversation.turn(turn.parent));
  if (conversation.mode === "complete") {
    return ["v1/completions", { ...body, prompt: path.at(-1).text + turn.text }];
  }
  const messages = path.map(({ role, text }) => ({ role, content: text }));
  const { system, thinking } = settings.of(conversation);
  if (system.trim()) messages.unshift({ role: "system", content: system.trim() });
  if (thinking) body.chat_template_kwargs = { enable_thinking: thinking === "on" };
  if (turn.text) {
    messages.push({ role: "assistant", content: turn.text });
    Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
  }
  return ["v1/chat/completions", { ...body, messages }];
}

const ENDS = {
  length: "token limit reached", stopped: "stopped", abort: "ended by the server",
  failed: "broken off", edited: "edited",
};

/** Returns the line of numbers below an answer. */
function sentenceOf(turn, answering) {
  const { tokens, speed, accepted, wait } = turn.numbers ?? {};
  if (answering && !answering.came) return answering.progress || "waiting for the server";
  const parts = [];
  if (tokens) parts.push(`${tokens} token${tokens === 1 ? "" : "s"}`);
  if (speed) parts.push(`${speed < 10 ? speed.toFixed(1) : Math.round(speed)} tokens/s`);
  if (accepted) parts.push(`mean accept length ${accepted.toFixed(2)}`);
  if (wait) parts.push(`first token ${wait < 1000 ? `${Math.round(wait)} ms` : `${(wait / 1000).toFixed(1)} s`}`);
  if (turn.end in ENDS) parts.push(ENDS[turn.end]);
  if (turn.end === "running" && !answering) parts.push("unfinished");
  if (model.name && turn.model && turn.model !== model.name) parts.push(turn.model);
  return parts.join("\u00a0· ");
}

/** Returns the sentence for screen readers at the end of an answer. */
function endOf(turn) {
  if (turn.end === "failed") return `The answer broke off: ${turn.problem}`;
  if (turn.end === "stopped") return "The answer was stopped.";
  if (turn.end === "length") return "The answer ended at the token limit.";
  if (turn.end === "abort") return "The server ended the answer.";
  return "The answer has ended.";
}
