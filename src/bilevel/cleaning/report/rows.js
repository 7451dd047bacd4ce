// The rows of the page, and what was decided of them; controls.js follows in the same scope.

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
