"use strict";
// The theme, before anything is shown: the system's, unless the settings name one.

function showTheme(name) {
  if (name) document.documentElement.dataset.theme = name;
  else delete document.documentElement.dataset.theme;
}

try { showTheme(JSON.parse(localStorage.getItem("cpmcu.settings"))?.theme); } catch { /* none is kept */ }
