// Light or dark, before anything is drawn. Loaded as a plain script so that nothing flashes.
(() => {
  const look = localStorage.getItem("keepsight-look");
  if (look === "light" || look === "dark") document.documentElement.dataset.look = look;
})();
