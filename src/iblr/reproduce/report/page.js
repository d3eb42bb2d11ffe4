"use strict";
// The page: themes, pictures drawn when they come into view, legends and sliders.
(() => {
  const root = document.documentElement;
  const strokes = JSON.parse(document.getElementById("strokes").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const coarse = window.matchMedia("(pointer: coarse)");
  const DRAWN = { displaylogo: false, responsive: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };
  const PLAIN = { displayModeBar: false };
  const STILL = { staticPlot: true };
  const DASHES = { dash: "5 3", dot: "1.5 2.5", dashdot: "5 2.5 1.5 2.5" };
  const HUES = ["iblr", "blr", "bbvi", "vogn", "vadam", "free1", "free2", "free3", "free4"];
  let theme = null;

  /* Themes */
  function chosen() {
    let name = null;
    try { name = localStorage.getItem("iblr-report-theme"); } catch (error) { /* no storage */ }
    return name === "light" || name === "dark" ? name : null;
  }

  function current() {
    return root.dataset.theme;
  }

  function apply(name) {
    root.dataset.theme = name;
    const probe = document.body.appendChild(document.createElement("span"));
    const read = (variable) => {
      probe.style.color = `var(--${variable})`;
      return getComputedStyle(probe).color;
    };
    const hues = Object.fromEntries(HUES.map((hue) => [hue, read(`hue-${hue}`)]));
    const rest = ["ground", "raised", "rule", "grid", "muted", "ink", "density"];
    theme = { hues, coarse: coarse.matches, ...Object.fromEntries(rest.map((key) => [key, read(key)])) };
    probe.remove();
    const other = name === "dark" ? "light" : "dark";
    const button = document.getElementById("theme");
    button.hidden = false;
    button.textContent = other === "dark" ? "Dark" : "Light";
    button.setAttribute("aria-label", `Use the ${other} theme`);
    for (const picture of pictures) picture.redraw();
  }

  function system() {
    return dark.matches ? "dark" : "light";
  }

  // Choosing what the system has anyway is to follow it again.
  function toggle() {
    const name = current() === "dark" ? "light" : "dark";
    try {
      if (name === system()) localStorage.removeItem("iblr-report-theme");
      else localStorage.setItem("iblr-report-theme", name);
    } catch (error) { /* not remembered */ }
    apply(name);
  }

  /* Pictures */
  class Picture {
    constructor(figure) {
      this.figure = figure;
      this.hidden = new Set();
      this.drawn = new Map();  // element -> its width and what to draw in it
      this.slider = figure.querySelector(".slider input");
      this.slider?.addEventListener("input", () => this.slide());
    }

    get data() {
      this.parsed ??= JSON.parse(document.getElementById(`${this.figure.id}-data`).textContent);
      return this.parsed;
    }

    // Everything of this picture, or only one element of it.
    draw(only = null) {
      const { data, figure } = this;
      if (!this.started) {
        this.started = true;
        this.legend();
        if (this.slider) this.slide();
      }
      const plots = only ? [only] : [...figure.querySelectorAll(".plot")];
      for (const plot of plots) this.place(plot, data);
    }

    place(plot, data) {
      const width = Math.floor(plot.clientWidth);
      if (width < 40) return;
      const { hidden } = this;
      const index = this.slider ? Number(this.slider.value) : 0;
      let made, config = coarse.matches ? PLAIN : DRAWN;
      if (data.kind === "curves") made = Pictures.curves(data, strokes, theme, width, hidden);
      else if (data.kind === "plane") made = Pictures.ellipses(data, strokes, theme, width, hidden);
      else if (data.kind === "gallery") {
        const small = plot.classList.contains("small");
        const order = [...this.figure.querySelectorAll(".plot.small")].indexOf(plot) - 1;
        const which = small ? order : plot.classList.contains("exact") ? -1 : this.slider ? index : 0;
        made = Pictures.panel(data, which, theme, width, small);
        if (small) config = STILL;
      } else {
        const order = [...this.figure.querySelectorAll(".plot")].indexOf(plot);
        const coordinate = index * data.shown + order;
        const there = coordinate < data.points.length;
        plot.parentElement.hidden = !there;
        if (!there) return;
        plot.previousElementSibling.textContent = `Coordinate ${coordinate + 1}`;
        made = Pictures.marginal(data, coordinate, strokes, theme, width, hidden);
        config = PLAIN;
      }
      this.drawn.set(plot, width);
      Plotly.react(plot, made.data, made.layout, config);
    }

    redraw() {
      if (this.started) this.legend();
      for (const plot of this.drawn.keys()) this.place(plot, this.data);
    }

    resized(plot) {
      const before = this.drawn.get(plot);
      if (before !== undefined && Math.abs(before - Math.floor(plot.clientWidth)) > 1) this.place(plot, this.data);
    }

    slide() {
      const { data, slider } = this;
      const index = Number(slider.value);
      const output = this.figure.querySelector(".slider output");
      if (data.kind === "gallery") {
        const { label } = data.panels[index];
        output.textContent = label;
        slider.setAttribute("aria-valuetext", label);
        this.caption();
        const plot = this.figure.querySelector(".plot.chosen");
        if (this.drawn.has(plot)) this.place(plot, data);
      } else {
        const first = index * data.shown + 1;
        const last = Math.min(first + data.shown - 1, data.points.length);
        output.textContent = `${first} to ${last} of ${data.points.length}`;
        slider.setAttribute("aria-valuetext", output.textContent);
        for (const item of this.figure.querySelectorAll(".marginal-panels li")) item.hidden = false;
        if (this.drawn.size) this.draw();
      }
    }

    caption() {
      const { label, caption } = this.data.panels[this.slider ? Number(this.slider.value) : 0];
      const place = this.figure.querySelector(".chosen-caption");
      const strong = document.createElement("strong");
      strong.textContent = label;
      place.replaceChildren(strong, ` ${caption}`);
    }

    legend() {
      const place = this.figure.querySelector(".legend");
      const made = Pictures.entries(this.data, strokes);
      if (this.data.kind === "gallery") this.caption();
      if (place.childElementCount !== made.length) {
        place.replaceChildren(...made.map((entry) => this.button(entry, made)));
      }
      made.forEach((entry, i) => {
        place.children[i].setAttribute("aria-pressed", String(!this.hidden.has(entry.name)));
        place.children[i].querySelector("svg").replaceWith(swatch(entry));
      });
    }

    // A click hides or shows; a double click leaves this one alone, or brings all back.
    button(entry, all) {
      const button = document.createElement("button");
      button.type = "button";
      button.append(swatch(entry), entry.name);
      button.title = "Show or hide; double click for this one alone";
      button.addEventListener("click", () => {
        if (!this.hidden.delete(entry.name)) this.hidden.add(entry.name);
        this.redraw();
      });
      button.addEventListener("dblclick", () => {
        const others = all.filter((other) => other.name !== entry.name).map((other) => other.name);
        const alone = others.every((name) => this.hidden.has(name));
        this.hidden = new Set(alone ? [] : others);
        this.redraw();
      });
      return button;
    }
  }

  function swatch(entry) {
    const { colour, dash, width } = Pictures.stroke(entry.key, strokes, theme);
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    const add = (name, attributes) => {
      const shape = document.createElementNS(svg.namespaceURI, name);
      for (const [key, value] of Object.entries(attributes)) shape.setAttribute(key, value);
      svg.append(shape);
    };
    for (const [key, value] of Object.entries({ width: 22, height: 12, viewBox: "0 0 22 12", "aria-hidden": "true" })) {
      svg.setAttribute(key, value);
    }
    if (entry.marker) {
      add("circle", { cx: 11, cy: 6, r: 4, fill: "none", stroke: colour, "stroke-width": 1.75 });
    } else if (entry.symbol !== undefined) {
      add("path", { d: SHAPES[entry.symbol % SHAPES.length], fill: colour, stroke: colour, "stroke-width": 1 });
    } else {
      add("path", { d: "M1 6H21", fill: "none", stroke: colour, "stroke-width": width,
        "stroke-dasharray": DASHES[entry.dash ?? dash] ?? "none" });
    }
    return svg;
  }

  // The same shapes as Pictures.MARKS, in their order.
  const SHAPES = [
    "M11 1L16 6L11 11L6 6Z",
    "M8 2L11 5L14 2L15 3L12 6L15 9L14 10L11 7L8 10L7 9L10 6L7 3Z",
    "M11 1L12.5 4.6L16.2 4.8L13.3 7.2L14.3 11L11 8.8L7.7 11L8.7 7.2L5.8 4.8L9.5 4.6Z",
    "M11 1.5L16 10.5H6Z",
    "M7 2H15V10H7Z",
    "M9.5 1H12.5V4.5H16V7.5H12.5V11H9.5V7.5H6V4.5H9.5Z",
  ];

  const pictures = [...document.querySelectorAll("figure.picture")].map((figure) => new Picture(figure));
  const owner = new Map();
  for (const picture of pictures) {
    for (const plot of picture.figure.querySelectorAll(".plot")) owner.set(plot, picture);
  }

  apply(chosen() ?? system());
  document.getElementById("theme").addEventListener("click", toggle);
  dark.addEventListener("change", () => { if (!chosen()) apply(system()); });

  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      seen.unobserve(entry.target);
      owner.get(entry.target).draw(entry.target);
    }
  }, { rootMargin: "500px 0px" });
  const sized = new ResizeObserver((entries) => {
    for (const entry of entries) owner.get(entry.target).resized(entry.target);
  });
  for (const plot of owner.keys()) { seen.observe(plot); sized.observe(plot); }

  function renderAll() {
    for (const plot of owner.keys()) {
      seen.unobserve(plot);
      if (!owner.get(plot).drawn.has(plot)) owner.get(plot).draw(plot);
    }
  }
  window.renderAll = renderAll;
  if (new URLSearchParams(location.search).has("all")) renderAll();

  /* Paper */
  let before = null;
  window.addEventListener("beforeprint", () => {
    before = { theme: current(), open: [...document.querySelectorAll("main details:not([open])")] };
    document.body.classList.add("printing");
    for (const details of before.open) details.open = true;
    renderAll();
    apply("light");
  });
  window.addEventListener("afterprint", () => {
    if (!before) return;
    document.body.classList.remove("printing");
    for (const details of before.open) details.open = false;
    apply(before.theme);
    before = null;
  });

  /* Contents: closed on a phone, and marking where the reader is */
  const contents = document.querySelector("nav details");
  if (!window.matchMedia("(min-width: 68rem)").matches) contents.open = false;
  const links = new Map([...document.querySelectorAll("nav a")].map((link) => [link.hash.slice(1), link]));
  const passing = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const link = links.get(entry.target.id);
      if (!entry.isIntersecting) link?.removeAttribute("aria-current");
      else link?.setAttribute("aria-current", "true");
    }
  }, { rootMargin: "-25% 0px -74% 0px" });
  for (const section of document.querySelectorAll("section.experiment")) passing.observe(section);
})();
