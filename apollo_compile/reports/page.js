"use strict";
// What needs a hand on the page: theme, switching and zooming timelines, details of a segment, sorting tables.
// The page is complete without it: every text and position was written by render_html.py.

const tip = document.getElementById("tip");
const PADDING = 9; // pixels that a label keeps from the ends of its bar, together
const MAX_ZOOM = 128;
const FINE = 4; // from this zoom on the axis has its minor ticks too
const pen = document.createElement("canvas").getContext("2d");
const widths = new Map(); // of labels, in pixels: every bar has the same font

document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
});

for (const table of document.querySelectorAll("table[data-sort]")) {
  table.tHead.addEventListener("click", (event) => {
    const header = event.target.closest("th");
    if (header) sort(table, header);
  });
}

function sort(table, header) {
  const now = header.getAttribute("aria-sort");
  const first = header.classList.contains("n") ? -1 : 1; // of numbers the largest come first
  const sign = now === null ? first : now === "ascending" ? -1 : 1;
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
  const key = (row) => {
    const cell = row.cells[header.cellIndex];
    return "v" in cell.dataset ? Number(cell.dataset.v) : cell.textContent.trim();
  };
  const compare = (a, b) => {
    const [x, y] = [key(a), key(b)];
    if (x === "" || y === "") return x === y ? 0 : x === "" ? 1 : -1; // rows without a value stay below
    return sign * (typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y)));
  };
  table.tBodies[0].append(...[...table.tBodies[0].rows].sort(compare));
}

for (const section of document.querySelectorAll("section.graph")) {
  const chart = section.querySelector("[data-chart]");
  if (chart) makeChart(section, chart);
}

function widthOf(label, element) {
  if (!widths.has(label)) {
    const style = getComputedStyle(element);
    pen.font = `${style.fontWeight} ${style.fontSize} ${style.fontFamily}`;
    widths.set(label, pen.measureText(label).width);
  }
  return widths.get(label);
}

function makeChart(section, chart) {
  const panes = [...chart.querySelectorAll(".line .scroll")];
  const output = chart.querySelector("output");
  const rows = new Map([...section.querySelectorAll("[data-segments] tbody tr")].map((row) => [row.dataset.s, row]));
  let zoom = 1;

  for (const button of chart.querySelectorAll("[data-show]")) {
    button.addEventListener("click", () => {
      for (const other of chart.querySelectorAll("[data-show]")) other.setAttribute("aria-pressed", other === button);
      for (const line of chart.querySelectorAll(".line")) {
        line.hidden = button.dataset.show !== "all" && line.dataset.line !== button.dataset.show;
      }
      fitLabels();
    });
  }

  for (const button of chart.querySelectorAll("[data-zoom]")) {
    button.addEventListener("click", () => setZoom(Number(button.dataset.zoom) * zoom || 1));
  }

  function setZoom(wanted, pane = panes.find((p) => p.offsetParent) ?? panes[0], at = pane.clientWidth / 2) {
    const before = zoom;
    const place = (pane.scrollLeft + at) / before; // what is under the pointer stays there
    zoom = Math.min(MAX_ZOOM, Math.max(1, wanted));
    for (const other of panes) other.firstElementChild.style.width = `${100 * zoom}%`;
    for (const other of panes) other.scrollLeft = place * zoom - at;
    output.textContent = `${Number(zoom.toPrecision(2))}x`;
    chart.classList.toggle("fine", zoom >= FINE);
    fitLabels();
  }

  function fitLabels() {
    for (const pane of panes) {
      const width = pane.clientWidth * zoom;
      for (const bar of pane.querySelectorAll(".bar")) {
        const text = bar.lastElementChild;
        const full = (text.dataset.full ??= text.textContent);
        const room = (parseFloat(bar.getAttribute("width")) / 100) * width - PADDING;
        const label = [full, full.slice(full.lastIndexOf(".") + 1)].find((name) => widthOf(name, text) <= room) ?? "";
        if (text.textContent !== label) text.textContent = label;
        bar.classList.toggle("tight", !label);
      }
      let end = -Infinity; // of the last label on the axis that is shown
      for (const text of pane.querySelectorAll(".tick text")) {
        const isShown = zoom >= FINE || !text.closest(".minor");
        const half = widthOf(text.textContent, text) / 2;
        const start = (parseFloat(text.parentElement.getAttribute("x")) / 100) * width - (text.matches(".first") ? 0 : half);
        const fits = isShown && start > end + PADDING && start + 2 * half <= width;
        text.style.visibility = fits ? "" : "hidden";
        if (fits) end = start + 2 * half;
      }
    }
  }
  fitLabels(); // the observer would only do so after the first frame
  new ResizeObserver(fitLabels).observe(chart);

  let isSyncing = false;
  for (const pane of panes) {
    pane.addEventListener("scroll", () => {
      if (isSyncing) return;
      isSyncing = true;
      for (const other of panes) if (other !== pane) other.scrollLeft = pane.scrollLeft;
      requestAnimationFrame(() => { isSyncing = false; });
    });
    pane.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      setZoom(zoom * Math.exp(-event.deltaY / 300), pane, event.clientX - pane.getBoundingClientRect().left);
    }, { passive: false });
    pane.addEventListener("pointerover", (event) => show(event.target.closest(".bar"), event));
    pane.addEventListener("pointermove", (event) => { if (!tip.hidden) placeTip(event.clientX, event.clientY); });
    pane.addEventListener("pointerleave", hide);
    pane.addEventListener("focusin", (event) => show(event.target.closest(".bar")));
    pane.addEventListener("focusout", hide);
    pane.addEventListener("keydown", (event) => onKey(event, pane));
  }

  function onKey(event, pane) {
    const bars = [...pane.querySelectorAll(".bar")];
    const now = bars.indexOf(document.activeElement);
    const next = { ArrowRight: now + 1, ArrowLeft: now - 1, Home: 0, End: bars.length - 1 }[event.key];
    if (next !== undefined) {
      bars[Math.min(bars.length - 1, Math.max(0, next))].focus();
    } else if (event.key === "Escape") {
      pane.focus();
      hide();
    } else if (event.key === "+" || event.key === "=") {
      setZoom(zoom * 2, pane);
    } else if (event.key === "-") {
      setZoom(zoom / 2, pane);
    } else {
      return;
    }
    event.preventDefault();
  }

  function show(bar, event) {
    hide();
    if (!bar) return;
    const id = bar.dataset.s;
    const row = rows.get(id);
    const needs = new Set(row ? row.dataset.after.split(" ") : []);
    for (const other of chart.querySelectorAll(".bar")) {
      other.classList.toggle("on", other.dataset.s === id);
      other.classList.toggle("needs", needs.has(other.dataset.s));
    }
    for (const line of chart.querySelectorAll(".waits line")) {
      line.classList.toggle("on", line.dataset.a === id || line.dataset.b === id);
    }
    if (row) {
      row.classList.add("on");
      fillTip(row);
    } else { // a bar without a row in a table says all itself
      tip.textContent = bar.getAttribute("aria-label");
      tip.hidden = false;
    }
    const box = bar.getBoundingClientRect();
    const view = bar.closest(".scroll").getBoundingClientRect();
    placeTip(event ? event.clientX : Math.max(box.left, view.left), event ? event.clientY : box.bottom);
  }

  function hide() {
    tip.hidden = true;
    for (const marked of section.querySelectorAll(".on, .needs")) marked.classList.remove("on", "needs");
  }
}

function fillTip(row) {
  const titles = row.closest("table").tHead.rows[0].cells;
  const title = document.createElement("b");
  title.textContent = row.cells[0].textContent;
  const list = document.createElement("dl");
  for (let column = 1; column < row.cells.length; column += 1) {
    if (!row.cells[column].textContent) continue;
    const name = document.createElement("dt");
    const value = document.createElement("dd");
    name.textContent = titles[column].textContent;
    value.textContent = row.cells[column].textContent;
    list.append(name, value);
  }
  tip.replaceChildren(title, list);
  tip.hidden = false;
}

function placeTip(x, y) {
  const { offsetWidth: width, offsetHeight: height } = tip;
  const left = x + 16 + width > innerWidth ? Math.max(8, Math.min(x - width - 16, innerWidth - width - 8)) : x + 16;
  const top = y + 18 + height > innerHeight ? Math.max(8, y - height - 18) : y + 18;
  tip.style.left = `${left}px`;
  tip.style.top = `${top}px`;
}
