"use strict";
// Requests to the server, and its event stream.

/** The error of a failed request: the server's message, or a message about the connection. */
class Refusal extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

const apiKey = {
  get: () => session.get("cpmcu.key") ?? "",
  set: (key) => session.set("cpmcu.key", key || null),
};

/** Sends a request and returns the reply. Throws Refusal or AbortError. */
async function ask(path, body, signal) {
  const headers = {};
  if (apiKey.get()) headers.Authorization = `Bearer ${apiKey.get()}`;
  if (body) headers["Content-Type"] = "application/json";
  let reply;
  try {
    reply = await fetch(path, {
      method: body ? "POST" : "GET", headers, signal, body: body && JSON.stringify(body),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal(0, "The server cannot be reached.");
  }
  if (reply.ok) return reply;
  let said = null;
  try { said = (await reply.json()).error?.message; } catch { /* not from cpmcu */ }
  throw new Refusal(reply.status, said || `The server answered with status ${reply.status}.`);
}

/** Yields the events of a streamed reply. Throws Refusal on an error event or a lost connection, or AbortError. */
async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let piece;
    try { piece = await reader.read(); } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Refusal(0, "The connection to the server was lost.");
    }
    if (piece.done) throw new Refusal(0, "The connection to the server was lost.");
    const lines = (rest + piece.value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      const data = line.slice(6).trim();
      if (data === "[DONE]") return;
      yield eventOf(data);
    }
  }
}

function eventOf(data) {
  let event;
  try { event = JSON.parse(data); } catch { throw new Refusal(500, "What the server sent cannot be read."); }
  if (event.error) throw new Refusal(500, event.error.message);
  return event;
}

/** Returns a sentence about a server that is not ready; null if it is ready. */
async function notReady() {
  const health = await fetch("health").catch(() => null);
  if (health?.ok) return null;
  const state = health ? (await health.json().catch(() => ({}))).status : null;
  if (state === "loading") return "The model is loading…";
  return state ? `The server says: ${state}.` : "The server cannot be reached.";
}

/** Returns {name, context, chats, thinks} of the model. Throws Refusal. */
async function describeModel() {
  const model = (await (await ask("v1/models")).json()).data[0];
  const template = (await (await ask("tokenizer_info")).json()).chat_template ?? "";
  return { name: model.id, context: model.max_model_len, chats: Boolean(template), thinks: template.includes("enable_thinking") };
}
