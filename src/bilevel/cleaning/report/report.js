"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const { classes, given, predicted, grid } = data;
  const total = given.length;
  const scores = { quality: data.quality, weight: data.weight };
  const images = Object.keys(data.images).length > 0;
  const byId = (id) => document.getElementById(id);
  const number = new Intl.NumberFormat("en");
  const score = (steps) => (steps / grid).toFixed(steps < grid / 100 && steps > 0 ? 4 : 2);
  const nameOf = (row) => (data.ids ? data.ids[row] : String(row));

  const state = {
    score: "quality",
    threshold: data.threshold,
    search: "",
    given: "",
    predicted: "",
    verdict: "suspect",
    decision: "",
    sort: "quality",
    descending: false,
    view: images ? "gallery" : "table",
    page: 0,
    size: 48,
    focus: 0,
  };
  let rows = [];

  // Everything on the page that comes from the data is made here, as text and never as markup.
  const make = (tag, attributes = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name === "on") for (const [event, f] of Object.entries(value)) element.addEventListener(event, f);
      else if (value === true) element.setAttribute(name, "");
      else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
    }
    element.append(...children.filter((child) => child !== null));
    return element;
  };

  const isSuspect = (row) => scores[state.score][row] < state.threshold;
  const hasSuggestion = (row) => predicted[row] !== given[row];

  // --- decisions -------------------------------------------------------------------------------

  const decisions = new Map();
  const past = [];
  const store = `bilevel.review.${data.key}`;

  const recall = () => {
    try {
      const saved = JSON.parse(localStorage.getItem(store) || "[]");
      for (const [row, decision] of saved) decisions.set(row, decision);
    } catch {
      // Some browsers store nothing for local files; decisions then last as long as the page.
    }
  };
  const remember = () => {
    try {
      localStorage.setItem(store, JSON.stringify([...decisions]));
    } catch {
      // See above.
    }
  };
  const decide = (changes) => {
    past.push(changes.map(([row]) => [row, decisions.get(row)]));
    apply(changes);
  };
  const apply = (changes) => {
    for (const [row, decision] of changes) {
      if (decision) decisions.set(row, decision);
      else decisions.delete(row);
    }
    remember();
    showProgress();
    for (const [row] of changes) {
      const old = document.querySelector(`[data-row="${row}"]`);
      if (old) mark(old, row);
    }
  };
  const undo = () => {
    const changes = past.pop();
    if (changes) apply(changes);
  };
  const showProgress = () => {
    let accepted = 0;
    for (const decision of decisions.values()) accepted += decision === "accept";
    byId("reviewed").textContent = number.format(decisions.size);
    byId("accepted").textContent = number.format(accepted);
    byId("kept").textContent = number.format(decisions.size - accepted);
    byId("export-reviewed").disabled = decisions.size === 0;
    byId("undo").disabled = past.length === 0;
  };

  // --- which rows, in which order --------------------------------------------------------------

  let haystack = null;
  const textOf = (row) =>
    [nameOf(row), classes[given[row]], classes[predicted[row]], ...data.cells.map((c) => c[row])]
      .join("\n")
      .toLowerCase();

  const KEYS = {
    quality: { title: "label quality", of: (row) => data.quality[row] },
    weight: { title: "weight", of: (row) => data.weight[row] },
    row: { title: data.ids ? "order in the data" : "row", of: (row) => row },
    given: { title: "given label", of: (row) => given[row] },
    predicted: { title: "suggestion", of: (row) => predicted[row] },
    decision: { title: "review", of: (row) => ({ accept: 0, keep: 1 })[decisions.get(row)] ?? 2 },
  };

  const select = () => {
    const words = state.search.toLowerCase().trim();
    if (words && !haystack) haystack = Array.from({ length: total }, (_, row) => textOf(row));
    rows = [];
    for (let row = 0; row < total; row++) {
      if (state.given !== "" && given[row] !== Number(state.given)) continue;
      if (state.predicted !== "" && predicted[row] !== Number(state.predicted)) continue;
      if (state.verdict !== "" && isSuspect(row) !== (state.verdict === "suspect")) continue;
      if (state.decision !== "" && (decisions.get(row) || "none") !== state.decision) continue;
      if (words && !haystack[row].includes(words)) continue;
      rows.push(row);
    }
    const key = KEYS[state.sort].of;
    const sign = state.descending ? -1 : 1;
    rows.sort((a, b) => sign * (key(a) - key(b)) || data.quality[a] - data.quality[b] || a - b);
  };

  const refresh = ({ page = 0, focus = 0 } = {}) => {
    select();
    const pages = Math.max(1, Math.ceil(rows.length / state.size));
    state.page = Math.min(Math.max(page, 0), pages - 1);
    state.focus = focus;
    byId("pages").textContent = number.format(pages);
    byId("page").value = state.page + 1;
    byId("page").max = pages;
    for (const id of ["first", "previous"]) byId(id).disabled = state.page === 0;
    for (const id of ["next", "last"]) byId(id).disabled = state.page >= pages - 1;
    const noun = rows.length === 1 ? data.noun : `${data.noun}s`;
    byId("shown").textContent = `${number.format(rows.length)} ${noun}`;
    byId("sort").value = `${state.sort} ${state.descending ? "down" : "up"}`;
    draw();
  };
  const pageRows = () => rows.slice(state.page * state.size, (state.page + 1) * state.size);

  // --- the list --------------------------------------------------------------------------------

  const picture = (row) => {
    const source = data.images[row];
    if (!source) return make("span", { class: "picture none" }, "no image");
    return make("img", { class: "picture", src: `data:image/png;base64,${source}`, alt: `${data.noun} ${nameOf(row)}` });
  };
  const choice = (row, decision, title, disabled) =>
    make(
      "button",
      {
        type: "button",
        class: `choice ${decision}`,
        tabindex: "-1",
        disabled,
        "aria-label": `${title}, ${data.noun} ${nameOf(row)}`,
        on: { click: () => decide([[row, decisions.get(row) === decision ? undefined : decision]]) },
      },
      title,
    );
  const choices = (row) =>
    make(
      "span",
      { class: "choices" },
      choice(row, "accept", "Accept", !hasSuggestion(row)),
      choice(row, "keep", "Keep", false),
    );
  const meter = (row) =>
    make(
      "span",
      { class: "meter", style: `--part:${data.quality[row] / grid}`, title: "label quality" },
      score(data.quality[row]),
    );
  const suggestion = (row) =>
    hasSuggestion(row) ? make("b", {}, classes[predicted[row]]) : make("i", { class: "soft" }, "as given");

  const mark = (element, row) => {
    const decision = decisions.get(row);
    element.classList.toggle("accepted", decision === "accept");
    element.classList.toggle("kept", decision === "keep");
    for (const button of element.querySelectorAll(".choice"))
      button.setAttribute("aria-pressed", String(button.classList.contains(decision || "none")));
  };

  const card = (row, place) => {
    const element = make(
      "li",
      { class: "sample", tabindex: place === state.focus ? "0" : "-1", "data-row": row, "data-place": place },
      picture(row),
      make(
        "span",
        { class: "labels" },
        make("s", { title: "given label" }, classes[given[row]]),
        make("i", { "aria-label": "looks like" }, "→"),
        suggestion(row),
      ),
      meter(row),
      make("span", { class: "id", title: nameOf(row) }, nameOf(row)),
      choices(row),
    );
    mark(element, row);
    return element;
  };

  const heading = (title, key, kind) => {
    if (!key) return make("th", { scope: "col", class: kind, title }, title);
    const sorted = state.sort === key;
    return make(
      "th",
      {
        scope: "col",
        class: kind,
        "aria-sort": sorted ? (state.descending ? "descending" : "ascending") : "none",
      },
      make(
        "button",
        {
          type: "button",
          "data-sort": key,
          on: {
            click: () => {
              state.descending = sorted && !state.descending;
              state.sort = key;
              refresh();
              document.querySelector(`[data-sort="${key}"]`).focus();
            },
          },
        },
        title,
        make("span", { class: "arrow", "aria-hidden": "true" }, sorted ? (state.descending ? "↓" : "↑") : ""),
      ),
    );
  };

  const details = (row, width) => {
    const values = data.details.rows[row];
    const list = make("dl", { class: "details" });
    values.forEach((value, i) =>
      list.append(make("div", {}, make("dt", {}, data.details.columns[i]), make("dd", {}, value))),
    );
    return make("tr", { class: "more" }, make("td", { colspan: width }, list));
  };

  const line = (row, place, width) => {
    const detailed = Boolean(data.details.rows[row]);
    const opener = !detailed
      ? null
      : make(
          "button",
          {
            type: "button",
            class: "open",
            "aria-expanded": "false",
            "aria-label": `All of ${data.noun} ${nameOf(row)}`,
            on: {
              click: ({ currentTarget: button }) => {
                const open = button.getAttribute("aria-expanded") === "true";
                const here = button.closest("tr");
                if (open) here.nextElementSibling.remove();
                else here.after(details(row, width));
                button.setAttribute("aria-expanded", String(!open));
              },
            },
          },
          "›",
        );
    const element = make(
      "tr",
      { class: "sample", tabindex: place === state.focus ? "0" : "-1", "data-row": row, "data-place": place },
      images ? make("td", { class: "image" }, picture(row)) : null,
      make("td", { class: "id", title: nameOf(row) }, nameOf(row)),
      make("td", { class: "label" }, classes[given[row]]),
      make("td", { class: "label" }, suggestion(row)),
      make("td", { class: "score" }, meter(row)),
      make("td", { class: "score" }, score(data.weight[row])),
      ...data.cells.map((column, i) => make("td", { class: data.long[i] ? "cell long" : "cell" }, column[row])),
      make("td", { class: "do" }, choices(row), opener),
    );
    mark(element, row);
    return element;
  };

  const draw = () => {
    const list = byId("list");
    const some = pageRows();
    if (!some.length) {
      list.replaceChildren(make("p", { class: "empty" }, "Nothing here. Clear the filters, or move the threshold."));
      return;
    }
    if (state.view === "gallery") {
      list.replaceChildren(make("ul", { class: "gallery" }, ...some.map(card)));
      return;
    }
    const head = [
      images ? heading("", null, "image") : null,
      heading(data.ids ? "id" : "row", "row", "id"),
      heading("given", "given", "label"),
      heading("suggested", "predicted", "label"),
      heading("quality", "quality", "score"),
      heading("weight", "weight", "score"),
      ...data.columns.map((column) => heading(column, null, "cell")),
      heading("review", "decision", "do"),
    ].filter((cell) => cell !== null);
    list.replaceChildren(
      make(
        "div",
        { class: "scroll" },
        make(
          "table",
          { class: "rows" },
          make("caption", { class: "hidden" }, "Samples and what their labels should be"),
          make("thead", {}, make("tr", {}, ...head)),
          make("tbody", {}, ...some.map((row, place) => line(row, place, head.length))),
        ),
      ),
    );
  };

  const moveFocus = (place) => {
    const target = document.querySelector(`[data-place="${place}"]`);
    if (!target) return;
    const old = document.querySelector(`[data-place="${state.focus}"]`);
    if (old) old.tabIndex = -1;
    state.focus = place;
    target.tabIndex = 0;
    target.focus();
  };
  const perLine = () => {
    if (state.view === "table") return 1;
    const cards = [...document.querySelectorAll(".gallery .sample")];
    const wrapped = cards.findIndex((c) => c.offsetTop > cards[0].offsetTop);
    return wrapped < 0 ? cards.length : wrapped;
  };

  byId("list").addEventListener("keydown", (event) => {
    const sample = event.target.closest(".sample");
    if (!sample || event.ctrlKey || event.metaKey || event.altKey) return;
    const row = Number(sample.dataset.row);
    const place = Number(sample.dataset.place);
    const act = {
      a: () => hasSuggestion(row) && (decide([[row, "accept"]]), moveFocus(place + 1)),
      k: () => (decide([[row, "keep"]]), moveFocus(place + 1)),
      u: () => decide([[row, undefined]]),
      ArrowRight: () => moveFocus(place + 1),
      ArrowLeft: () => moveFocus(place - 1),
      ArrowDown: () => moveFocus(place + perLine()),
      ArrowUp: () => moveFocus(place - perLine()),
    }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  });
  byId("list").addEventListener("focusin", (event) => {
    const sample = event.target.closest(".sample");
    if (sample && event.target === sample) state.focus = Number(sample.dataset.place);
  });

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
})();
