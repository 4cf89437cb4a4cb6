"use strict";
// Sets the theme before the first paint: that of the settings, else the system's.

function showTheme(name) {
  if (name) document.documentElement.dataset.theme = name;
  else delete document.documentElement.dataset.theme;
}

try { showTheme(JSON.parse(localStorage.getItem("cpmcu.settings"))?.theme); } catch { /* none is kept */ }
