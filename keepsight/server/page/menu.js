// A button that opens a small panel under it: Escape, a click elsewhere and a choice close it. Where
// there is room the panel stands open at the side, and the button is gone.

const WIDE = matchMedia("(min-width: 85rem)");

/** Make `panel` open and close with `opener`. */
export function menuOf(opener, panel) {
  function set(open) {
    panel.hidden = !open;
    opener.setAttribute("aria-expanded", String(open));
  }

  function dock() {
    panel.classList.toggle("docked", WIDE.matches);
    opener.hidden = WIDE.matches;
    set(WIDE.matches);
  }

  function close() {
    if (panel.hidden || WIDE.matches) return;
    if (panel.contains(document.activeElement)) opener.focus();
    set(false);
  }

  opener.addEventListener("click", () => {
    set(panel.hidden);
    if (!panel.hidden) panel.querySelector("button:not(:disabled)")?.focus();
  });
  panel.addEventListener("click", (event) => {
    if (event.target.closest("[data-closes]")) close();
  });
  addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !panel.hidden && !WIDE.matches) (event.preventDefault(), opener.focus(), close());
  });
  for (const room of [opener, panel]) {
    room.addEventListener("focusout", (event) => {
      const to = event.relatedTarget;
      if (to && to !== opener && !panel.contains(to)) close();
    });
  }
  addEventListener("pointerdown", (event) => {
    if (!panel.contains(event.target) && event.target !== opener) close();
  });
  WIDE.addEventListener("change", dock);
  dock();
  return { close };
}
