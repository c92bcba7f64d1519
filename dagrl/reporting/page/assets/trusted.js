"use strict";
// The page builds its elements itself. Libraries may empty one with `innerHTML = ""`; any other HTML is refused.
if (window.trustedTypes) {
  window.trustedTypes.createPolicy("default", { createHTML: (text) => (text === "" ? "" : null) });
}
