"use strict";
// The context meter: tokens of the branch that is shown, and of the model's longest sequence.

const NEARLY_FULL = 0.9;

function showContext() {
  const used = current.path().findLast((turn) => turn.numbers?.context)?.numbers.context;
  $("context").hidden = !used || !model.context;
  if ($("context").hidden) return;
  const share = Math.min(1, used / model.context);
  const full = share >= NEARLY_FULL;
  const [bar, words] = $("context").children;
  bar.firstElementChild.style.width = `${100 * share}%`;
  bar.setAttribute("aria-valuenow", used);
  bar.setAttribute("aria-valuemax", model.context);
  const [now, most] = [used, model.context].map((count) => count.toLocaleString("en"));
  words.textContent = `${now} of ${most} tokens${full ? ": nearly full" : ""}`;
  $("context").classList.toggle("full", full);
}
