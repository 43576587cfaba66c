"use strict";
(() => {
  const moments = JSON.parse(document.getElementById("moments").textContent);
  const plot = document.getElementById("plot"), cursor = document.getElementById("cursor");
  const readout = document.getElementById("readout");
  const first = moments.seconds[0], span = (moments.seconds[moments.seconds.length - 1] - first) || 1;
  plot.addEventListener("pointermove", (event) => {
    const area = plot.getBoundingClientRect();
    const time = first + (event.clientX - area.left) / area.width * span;
    let step = 0;
    while (step + 1 < moments.seconds.length && moments.seconds[step + 1] <= time) ++step;
    const parts = Object.entries(moments.frameworks).map(([name, sizes]) => `${name} ${sizes[step]}`);
    readout.textContent = `${moments.seconds[step].toFixed(3)} s: ${moments.total[step]} (${parts.join(", ")})`;
    cursor.style.left = `${(moments.seconds[step] - first) / span * 100}%`;
    cursor.hidden = false;
  });
  plot.addEventListener("pointerleave", () => { cursor.hidden = true; readout.textContent = ""; });
  const flame = document.getElementById("flame");
  if (flame === null) return;
  let widened = null;
  flame.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button === null) return;
    for (const box of flame.querySelectorAll(".away, .whole")) box.classList.remove("away", "whole");
    const box = button.parentElement;
    widened = widened === box ? null : box;
    for (let each = widened; each !== null && each !== flame; each = each.parentElement.closest(".box, .flame")) {
      each.classList.add("whole");
      for (const other of each.parentElement.children) if (other !== each && other.classList.contains("box")) other.classList.add("away");
    }
  });
})();
