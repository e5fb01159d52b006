// Light, dark, or as the system has it; remembered in this browser.
(() => {
  const NAMES = ["system", "light", "dark"];
  const PLACE = "chipmesh-theme";

  function read() {
    try {
      const name = localStorage.getItem(PLACE);
      return NAMES.includes(name) ? name : "system";
    } catch {
      return "system"; // A browser may forbid storage: the toggle then lasts as long as the page.
    }
  }

  function apply(name) {
    document.documentElement.dataset.theme = name;
  }

  function next() {
    const name = NAMES[(NAMES.indexOf(document.documentElement.dataset.theme) + 1) % NAMES.length];
    apply(name);
    try {
      localStorage.setItem(PLACE, name);
    } catch {
      return name;
    }
    return name;
  }

  apply(read());
  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme-button");
    const show = (name) => {
      button.textContent = `Theme: ${name}`;
    };
    show(document.documentElement.dataset.theme);
    button.addEventListener("click", () => show(next()));
  });
})();
