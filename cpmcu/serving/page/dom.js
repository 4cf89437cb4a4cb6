"use strict";
// Helpers to make elements. Texts go in as text nodes, never as HTML.

const $ = (id) => document.getElementById(id);

/** A new element. `attributes` are set as they are; `children` are nodes or texts. */
function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/** A copy of a drawing in index.html's template. */
function icon(name) { return $("icons").content.querySelector(`.${name}`).cloneNode(true); }

/** A button that is only a drawing; `label` is its name and its tooltip. */
function iconButton(name, label, act) {
  const button = make("button", { type: "button", class: "icon", "aria-label": label, title: label });
  button.append(icon(name));
  button.addEventListener("click", act);
  return button;
}

/** Gives screen readers a sentence. */
function say(text) { $("state").textContent = text; }

/** Shows a sentence above the message field, until the next one or "". */
function tell(text, action = null) {
  $("notice").replaceChildren(text, ...(action ? [action] : []));
  $("notice").hidden = !text;
}

/** Copies a text, and shows on the button that it did. */
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

/** Where the page does not come by HTTPS or from localhost, browsers have no other way. */
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

/** Calls `act` at most once a frame, however often it is asked to. */
function perFrame(act) {
  let frame = 0;
  return () => { frame ||= requestAnimationFrame(() => { frame = 0; act(); }); };
}
