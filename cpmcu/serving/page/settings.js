"use strict";
// Settings: the system prompt, sampling, theme. They are stored in this browser.

const COMPLETED = 512;  // default max_tokens of a text; the server's own default is 16

const settings = {
  values: { system: "", temperature: "", top_p: "", top_k: "", seed: "", max_tokens: "", thinking: "", theme: "" },

  load() {
    try { Object.assign(this.values, JSON.parse(local.get("cpmcu.settings") ?? "{}")); } catch { /* damaged */ }
    for (const name in this.values) this.values[name] = String(this.values[name] ?? "");
  },

  /** Returns the fields of a request. An empty setting is omitted: the model's default applies. */
  sampling(mode) {
    const found = {};
    for (const name of ["temperature", "top_p", "top_k", "seed", "max_tokens"]) {
      if (this.values[name] !== "") found[name] = Number(this.values[name]);
    }
    if (mode === "complete") found.max_tokens ??= COMPLETED;
    return found;
  },
};

const fieldsOf = () => [...$("settings").querySelectorAll("[name]")];

function showSettings() {
  for (const field of fieldsOf()) field.value = settings.values[field.name];
  $("forget").hidden = !apiKey.get();
  $("wrong").hidden = true;
  $("settings").showModal();
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
  for (const field of fieldsOf()) settings.values[field.name] = field.value;
  local.set("cpmcu.settings", JSON.stringify(settings.values));
  $("settings").close();
}

$("settings").querySelector("form").addEventListener("submit", (event) => {
  event.preventDefault();
  takeSettings();
});
$("settings").addEventListener("close", () => showTheme(settings.values.theme));
$("cancel-settings").addEventListener("click", () => $("settings").close());
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
