// Light or dark, before anything is drawn. Loaded as a plain script so that nothing flashes.
document.documentElement.dataset.look = localStorage.getItem("keepsight-look") ?? "system";
