"use strict";
// Helpers that create elements. Text becomes text nodes, never HTML.

const $ = (id) => document.getElementById(id);

/** Creates an element. `attributes` are set unchanged; `children` are nodes or strings. */
function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/** Copies an icon of index.html's template. */
function icon(name) { return $("icons").content.querySelector(`.${name}`).cloneNode(true); }

/** Creates a button with an icon; `label` is its name and its tooltip. */
function iconButton(name, label, act) {
  const button = make("button", { type: "button", class: "icon", "aria-label": label, title: label });
  button.append(icon(name));
  button.addEventListener("click", act);
  return button;
}

/** Announces a sentence to screen readers. */
function say(text) { $("state").textContent = text; }

/** Shows a sentence above the message field until the next call; "" hides it. */
function tell(text, action = null) {
  $("notice").replaceChildren(text, ...(action ? [action] : []));
  $("notice").hidden = !text;
}

/** Copies a text and shows the success on the button. */
async function copy(text, button) {
  let done = true;
  try { await navigator.clipboard.writeText(text); } catch { done = copyBySelection(text); }
  if (!done) return tell("The browser does not let this page copy.");
  say("Copied.");
  if (button.dataset.done) return;
  button.dataset.done = "yes";
  const label = button.getAttribute("aria-label");
  const before = [...button.childNodes];
  button.replaceChildren(icon("check"));
  button.setAttribute("aria-label", "Copied");
  setTimeout(() => {
    button.replaceChildren(...before);
    button.setAttribute("aria-label", label);
    delete button.dataset.done;
  }, 1500);
}

/** Copies without the clipboard API, which browsers offer only for HTTPS and localhost. */
function copyBySelection(text) {
  const focused = document.activeElement;
  const field = make("textarea", { class: "unseen", "aria-hidden": "true" });
  field.value = text;
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  focused?.focus();
  return done;
}

const SHORT = 8;  // ms

/** Returns a function that calls `act` at most once a frame, and less often if `act` takes long. */
function perFrame(act) {
  let frame = 0;
  let next = 0;
  const run = (now) => {
    if (now < next) { frame = requestAnimationFrame(run); return; }
    frame = 0;
    const begin = performance.now();
    act();
    const spent = performance.now() - begin;
    next = spent > SHORT ? begin + 4 * spent : 0;
  };
  return () => { frame ||= requestAnimationFrame(run); };
}
