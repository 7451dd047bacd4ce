// The threshold, filters and export, for the rows of rows.js, which comes before in the same scope.

// --- the threshold and what hangs on it ------------------------------------------------------

const SVG = "http://www.w3.org/2000/svg";
const BINS = 50;
const WIDE = 520;
const HIGH = 150;
const drawHistogram = () => {
  const bins = new Array(BINS).fill(0);
  for (const value of scores[state.score]) bins[Math.min(BINS - 1, Math.floor((value / grid) * BINS))]++;
  const most = Math.sqrt(Math.max(...bins));
  const histogram = byId("histogram");
  histogram.replaceChildren(histogram.firstElementChild);
  bins.forEach((count, i) => {
    // Square roots, because most labels are at the two ends, and the few in between matter.
    const height = count ? Math.max(2, (Math.sqrt(count) / most) * (HIGH - 4)) : 0;
    const bar = document.createElementNS(SVG, "rect");
    const place = { x: (i * WIDE) / BINS + 0.75, width: WIDE / BINS - 1.5, y: HIGH - height, height };
    for (const [name, value] of Object.entries(place)) bar.setAttribute(name, value);
    const below = ((i + 0.5) * grid) / BINS < state.threshold;
    bar.setAttribute("class", below ? "bar below" : "bar");
    const title = document.createElementNS(SVG, "title");
    title.textContent = `${(i / BINS).toFixed(2)} to ${((i + 1) / BINS).toFixed(2)}: ${number.format(count)}`;
    bar.append(title);
    histogram.append(bar);
  });
  const mark = document.createElementNS(SVG, "line");
  const x = (state.threshold / grid) * WIDE;
  for (const [name, value] of Object.entries({ x1: x, x2: x, y1: 0, y2: HIGH, class: "mark" }))
    mark.setAttribute(name, value);
  histogram.append(mark);
};

const countMatrix = () => {
  const counts = new Map();
  const suspects = new Array(classes.length).fill(0);
  const sizes = new Array(classes.length).fill(0);
  let largest = 1;
  for (let row = 0; row < total; row++) {
    sizes[given[row]]++;
    if (!isSuspect(row)) continue;
    suspects[given[row]]++;
    const cell = `${given[row]} ${predicted[row]}`;
    counts.set(cell, (counts.get(cell) || 0) + 1);
    largest = Math.max(largest, counts.get(cell));
  }
  return { counts, suspects, sizes, largest };
};
const drawMatrix = () => {
  const { counts, suspects, sizes, largest } = countMatrix();
  for (const cell of document.querySelectorAll("#matrix td[data-given]")) {
    const { given: i, predicted: j } = cell.dataset;
    const count = counts.get(`${i} ${j}`) || 0;
    cell.style.setProperty("--heat", (count / largest).toFixed(3));
    const chosen = state.given === i && state.predicted === j;
    cell.classList.toggle("chosen", chosen);
    if (!count) {
      cell.textContent = "·";
      continue;
    }
    const title = `${count} given ${classes[i]} that look like ${classes[j]}`;
    cell.replaceChildren(
      make(
        "button",
        {
          type: "button",
          tabindex: "-1",
          title,
          "aria-label": title,
          "aria-pressed": String(chosen),
          on: { click: () => showCell(chosen ? "" : i, chosen ? "" : j) },
        },
        number.format(count),
      ),
    );
  }
  for (const cell of document.querySelectorAll("#matrix [data-total]")) {
    const i = Number(cell.dataset.total);
    cell.replaceChildren(make("b", {}, number.format(suspects[i])), ` of ${number.format(sizes[i])}`);
  }
  const first = document.querySelector("#matrix td.chosen button") || document.querySelector("#matrix td button");
  if (first) first.tabIndex = 0;
};
const showCell = (i, j) => {
  state.given = byId("by-given").value = i;
  state.predicted = byId("by-predicted").value = j;
  state.verdict = byId("by-verdict").value = "suspect";
  drawMatrix();
  refresh();
  const button = document.querySelector("#matrix td.chosen button");
  if (button) button.focus({ preventScroll: true });
  if (i !== "") byId("review").scrollIntoView({ block: "start" });
};
byId("matrix").addEventListener("keydown", (event) => {
  const step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
  const cell = event.target.closest("td[data-given]");
  if (!step || !cell) return;
  event.preventDefault();
  const lines = [...byId("matrix").tBodies[0].rows];
  let [y, x] = [lines.indexOf(cell.parentElement) + step[0], cell.cellIndex + step[1]];
  while (lines[y] && lines[y].cells[x]) {
    const button = lines[y].cells[x].querySelector("button");
    if (button) {
      for (const other of document.querySelectorAll('#matrix button[tabindex="0"]')) other.tabIndex = -1;
      button.tabIndex = 0;
      button.focus();
      return;
    }
    [y, x] = [y + step[0], x + step[1]];
  }
});

const NOTES = {
  quality: "The probability that each label is right. Bars are drawn by the root of their count.",
  weight: "How much each sample was allowed to teach, 0 to 1. Bars are drawn by the root of their count.",
};
const showThreshold = () => {
  let count = 0;
  for (const value of scores[state.score]) count += value < state.threshold;
  const share = `${((100 * count) / total).toFixed(1)}%`;
  byId("threshold-answer").textContent =
    `${number.format(count)} of ${number.format(total)} labels (${share}) are below ${(state.threshold / grid).toFixed(2)}`;
  byId("headline-count").textContent = number.format(count);
  byId("headline-share").textContent = share;
  byId("score-note").textContent = NOTES[state.score];
  byId("threshold").value = state.threshold;
  byId("threshold-reset").hidden = state.threshold === data.threshold && state.score === "quality";
  drawHistogram();
  drawMatrix();
  refresh();
};
let due = 0;
byId("threshold").addEventListener("input", (event) => {
  state.threshold = Number(event.target.value);
  cancelAnimationFrame(due);
  due = requestAnimationFrame(showThreshold);
});
byId("threshold-reset").addEventListener("click", () => {
  state.threshold = data.threshold;
  state.score = "quality";
  document.querySelector('input[name="score"][value="quality"]').checked = true;
  showThreshold();
  byId("threshold").focus();
});
for (const radio of document.querySelectorAll('input[name="score"]'))
  radio.addEventListener("change", () => {
    state.score = radio.value;
    showThreshold();
  });
for (const radio of document.querySelectorAll('input[name="view"]'))
  radio.addEventListener("change", () => {
    state.view = radio.value;
    refresh({ page: state.page });
  });

// --- filters and pages -----------------------------------------------------------------------

const filters = { given: "by-given", predicted: "by-predicted", verdict: "by-verdict", decision: "by-decision" };
for (const id of ["by-given", "by-predicted"])
  classes.forEach((name, code) => byId(id).append(make("option", { value: code }, name.slice(0, 60))));
for (const [key, id] of Object.entries(filters))
  byId(id).addEventListener("change", (event) => {
    state[key] = event.target.value;
    drawMatrix();
    refresh();
  });
for (const [key, { title }] of Object.entries(KEYS))
  for (const [direction, sign] of [["up", "↑"], ["down", "↓"]])
    byId("sort").append(make("option", { value: `${key} ${direction}` }, `${title} ${sign}`));
byId("sort").addEventListener("change", (event) => {
  const [key, direction] = event.target.value.split(" ");
  state.sort = key;
  state.descending = direction === "down";
  refresh();
});
let waiting = 0;
byId("search").addEventListener("input", (event) => {
  clearTimeout(waiting);
  waiting = setTimeout(() => {
    state.search = event.target.value;
    refresh();
  }, 120);
});
byId("reset").addEventListener("click", () => {
  Object.assign(state, { search: "", given: "", predicted: "", verdict: "", decision: "" });
  byId("search").value = "";
  for (const id of Object.values(filters)) byId(id).value = "";
  drawMatrix();
  refresh();
});
byId("first").addEventListener("click", () => refresh({ page: 0 }));
byId("previous").addEventListener("click", () => refresh({ page: state.page - 1 }));
byId("next").addEventListener("click", () => refresh({ page: state.page + 1 }));
byId("last").addEventListener("click", () => refresh({ page: Infinity }));
byId("page").addEventListener("change", (event) => refresh({ page: Number(event.target.value) - 1 || 0 }));
byId("size").addEventListener("change", (event) => {
  const first = state.page * state.size;
  state.size = Number(event.target.value);
  refresh({ page: Math.floor(first / state.size) });
});
byId("accept-page").addEventListener("click", () =>
  decide(pageRows().filter((row) => hasSuggestion(row) && !decisions.has(row)).map((row) => [row, "accept"])),
);
byId("undo").addEventListener("click", undo);

// --- export ----------------------------------------------------------------------------------

const field = (value) => {
  const text = String(value);
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
};
const csv = (some) => {
  const head = "row,id,given_label,weight,label_quality,verdict,suggested_label,decision,final_label";
  const lines = some.map((row) => {
    const decision = decisions.get(row) || "";
    const mine = classes[given[row]];
    const other = classes[predicted[row]];
    return [
      row,
      nameOf(row),
      mine,
      data.weight[row] / grid,
      data.quality[row] / grid,
      isSuspect(row) ? "suspect" : "ok",
      isSuspect(row) || decision === "accept" ? other : mine,
      decision,
      decision === "accept" ? other : mine,
    ].map(field);
  });
  return [head, ...lines].map((l) => (Array.isArray(l) ? l.join(",") : l)).join("\r\n") + "\r\n";
};
const download = (name, some) => {
  const url = URL.createObjectURL(new Blob([csv(some)], { type: "text/csv;charset=utf-8" }));
  make("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
};
byId("export-reviewed").addEventListener("click", () =>
  download("reviewed.csv", [...decisions.keys()].sort((a, b) => a - b)),
);
byId("export-all").addEventListener("click", () =>
  download("labels-reviewed.csv", Array.from({ length: total }, (_, row) => row)),
);

recall();
document.documentElement.classList.add("scripted");
showProgress();
showThreshold();
