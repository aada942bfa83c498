// Before the first paint: the theme that was chosen here before, if any. Without one the system decides.
"use strict";
(() => {
  try {
    const chosen = localStorage.getItem("tinsmith.theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch {
    // Storage is closed to this page: the system decides.
  }
})();
