(() => {
  "use strict";
  // Quick tool tips in place of the browser's slow ones.
  const tip = document.getElementById("tip");
  const text = (shape) => {
    const title = shape.querySelector(":scope > title");
    if (title) {
      shape.dataset.tip = title.textContent;
      shape.setAttribute("aria-label", title.textContent);
      title.remove();
    }
    return shape.dataset.tip;
  };
  document.addEventListener("pointermove", (event) => {
    const shape = event.target.closest ? event.target.closest("svg rect, svg text") : null;
    const words = shape && text(shape);
    tip.hidden = !words;
    if (!words) return;
    tip.textContent = words;
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(4, Math.min(event.clientX + 12, innerWidth - box.width - 8)) + "px";
    const below = event.clientY + 16;
    tip.style.top = (below + box.height > innerHeight ? event.clientY - box.height - 10 : below) + "px";
  });
  document.addEventListener("pointerleave", () => { tip.hidden = true; });

  // The timeline: drag to zoom in, buttons for the keyboard.
  const board = document.querySelector(".timeline");
  if (!board) return;
  const whole = Number(board.dataset.window);
  const lanes = [...board.querySelectorAll(".zoomable")];
  const labels = [...board.querySelectorAll(".lane-axis text")];
  const units = 10000;
  let from = 0, to = 1;
  const three = (value) => value >= 99.95 ? value.toFixed(0) : value >= 9.995 ? value.toFixed(1) : value.toFixed(2);
  const duration = (ns) => {
    if (ns < 0.5) return "0";
    if (ns < 999.5) return ns.toFixed(0) + " ns";
    if (ns < 999.5e3) return three(ns / 1e3) + " µs";
    if (ns < 999.5e6) return three(ns / 1e6) + " ms";
    return three(ns / 1e9) + " s";
  };
  // Neighbouring figures must differ however far in: there they count from the first one.
  const show = (low, high) => {
    const width = Math.max(high - low, 1e-5);
    from = Math.max(0, Math.min(low, 1 - width));
    to = Math.min(1, from + width);
    for (const lane of lanes) {
      const height = lane.getAttribute("height");
      lane.setAttribute("viewBox", `${from * units} 0 ${(to - from) * units} ${height}`);
    }
    labels.forEach((label, index) => {
      const at = from + (to - from) * index / 5;
      const near = to - from < 0.2 && index > 0;
      label.textContent = near ? "+" + duration((to - from) * index / 5 * whole) : duration(at * whole);
    });
  };
  const bar = document.createElement("div");
  bar.className = "zoombar";
  const button = (words, label, act) => {
    const made = document.createElement("button");
    made.type = "button";
    made.textContent = words;
    made.setAttribute("aria-label", label);
    made.addEventListener("click", act);
    bar.append(made);
  };
  const zoom = (factor) => {
    const middle = (from + to) / 2, half = Math.min(1, (to - from) * factor) / 2;
    show(middle - half, middle + half);
  };
  const move = (share) => { const by = (to - from) * share; show(from + by, to + by); };
  button("+", "zoom in", () => zoom(0.5));
  button("−", "zoom out", () => zoom(2));
  button("←", "earlier", () => move(-0.5));
  button("→", "later", () => move(0.5));
  button("all", "the whole step", () => show(0, 1));
  bar.append("drag across to zoom in, double click for all");
  board.prepend(bar);
  board.classList.add("live");
  let begun = null;
  const place = (event) => {
    const box = lanes[0].getBoundingClientRect();
    return from + (to - from) * Math.max(0, Math.min(1, (event.clientX - box.left) / box.width));
  };
  board.addEventListener("pointerdown", (event) => {
    if (event.button === 0 && event.target.closest(".zoomable")) { begun = place(event); event.preventDefault(); }
  });
  addEventListener("pointerup", (event) => {
    if (begun === null) return;
    const [low, high] = [begun, place(event)].sort((a, b) => a - b);
    begun = null;
    if (high - low > (to - from) * 0.01) show(low, high);
  });
  board.addEventListener("dblclick", () => show(0, 1));
})();
