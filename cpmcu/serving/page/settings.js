"use strict";
// Settings: system prompt, sampling, theme. The common ones are stored in this browser, a conversation's
// own ones with it.

const COMPLETED = 512;  // default max_tokens of a text; the server's own default is 16

const NUMBERS = [
  "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed",
  "max_tokens",
];
const NAMES = ["system", "thinking", ...NUMBERS];  // a conversation can have its own values of them

const settings = {
  values: Object.fromEntries([...NAMES, "theme"].map((name) => [name, ""])),

  load() {
    try { Object.assign(this.values, JSON.parse(local.get("cpmcu.settings") ?? "{}")); } catch { /* damaged */ }
    for (const name in this.values) this.values[name] = String(this.values[name] ?? "");
  },

  /** Returns the settings of a conversation: its own, else the common ones. */
  of(conversation) {
    const own = conversation.settings;
    return own ? Object.fromEntries(NAMES.map((name) => [name, own[name] ?? ""])) : this.values;
  },
};

/** Returns the sampling fields of a request. An empty setting is omitted: the model's default applies. */
function sampling(conversation) {
  const values = settings.of(conversation);
  const found = {};
  for (const name of NUMBERS) if (values[name] !== "") found[name] = Number(values[name]);
  if (conversation.mode === "complete") found.max_tokens ??= COMPLETED;
  return found;
}

const fieldsOf = () => NAMES.map((name) => $("settings").querySelector(`[name=${name}]`));
const scopeOf = () => $("settings").querySelector("[name=scope]:checked").value;

let filled = "";  // the values that the fields were filled with

const valuesOf = () => Object.fromEntries(fieldsOf().map((field) => [field.name, field.value]));

function fill(values) {
  for (const field of fieldsOf()) {
    field.value = values[field.name];
    if (field.name === "system") fit(field);
  }
  filled = JSON.stringify(valuesOf());
}

function showSettings() {
  $(current.settings ? "scope-own" : "scope-common").checked = true;
  $("theme").value = settings.values.theme;
  $("forget").hidden = !apiKey.get();
  $("wrong").hidden = true;
  $("settings").showModal();
  fill(settings.of(current));
}

/** Shows the values of the chosen scope, unless the user has changed some. */
function changeScope() {
  if (JSON.stringify(valuesOf()) === filled) fill(scopeOf() === "own" ? settings.of(current) : settings.values);
}

/** Saves the entered values, or shows the first invalid one. */
function takeSettings() {
  const wrong = fieldsOf().find((field) => !field.validity.valid);
  if (wrong) {
    const { min, max, step, dataset: { name } } = wrong;
    const kind = step === "1" ? "a whole number" : "a number";
    $("wrong").textContent = `${name} must be ${kind} ${max ? `from ${min} to ${max}` : `of at least ${min}`}.`;
    $("wrong").hidden = false;
    return wrong.focus();
  }
  const own = scopeOf() === "own";
  if (own) current.settings = valuesOf();
  else Object.assign(settings.values, valuesOf());
  if (!own) current.settings = null;
  settings.values.theme = $("theme").value;
  local.set("cpmcu.settings", JSON.stringify(settings.values));
  chats.save(current);
  showList();
  $("settings").close();
}

$("settings").querySelector("form").addEventListener("submit", (event) => {
  event.preventDefault();
  takeSettings();
});
$("settings").addEventListener("close", () => showTheme(settings.values.theme));
$("cancel-settings").addEventListener("click", () => $("settings").close());
for (const field of $("settings").querySelectorAll("[name=scope]")) field.addEventListener("change", changeScope);
$("settings").querySelector("[name=system]").addEventListener("input", ({ target }) => fit(target));
$("open-settings").addEventListener("click", showSettings);
$("theme").addEventListener("change", () => showTheme($("theme").value));
$("forget").addEventListener("click", () => {
  apiKey.set("");
  $("settings").close();
  connect();
});
for (const button of document.querySelectorAll(".open-keys")) button.addEventListener("click", () => $("keys").showModal());
$("close-keys").addEventListener("click", () => $("keys").close());
settings.load();
