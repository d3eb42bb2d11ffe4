"use strict";
// From the data of a picture to Plotly's traces and layout. Nothing here touches the page.
const Pictures = (() => {
  const MARKS = ["diamond", "x", "star", "triangle-up", "square", "cross"];
  const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif';

  // Of "rgb(1, 2, 3)", which is how a browser tells a colour.
  const rgb = (colour) => colour.match(/[\d.]+/g).slice(0, 3).map(Number);

  // A colour between two others; a share of 1 is the second.
  function mixed(one, other, share) {
    const [a, b] = [rgb(one), rgb(other)];
    return `rgb(${a.map((value, i) => Math.round(value + (b[i] - value) * share)).join(",")})`;
  }

  function faint(colour, opacity) {
    return `rgba(${rgb(colour).join(",")},${opacity})`;
  }

  function stroke(name, strokes, theme) {
    const { hue, dash, pale, strong } = strokes[name];
    const full = hue === "ink" ? theme.ink : theme.hues[hue];
    const colour = pale ? mixed(full, theme.ground, 0.45) : full;
    return { full, colour, dash, strong, width: strong ? 3 : 1.75 };
  }

  function label(curve) {
    return curve.published && !/publish|paper/i.test(curve.name)
      ? `${curve.name} (published)`
      : curve.name;
  }

  // What the legend names, in order: each with the look of its swatch.
  function entries(picture, strokes) {
    const found = new Map();
    const add = (name, key, look) => found.has(name) || found.set(name, { name, key, ...look });
    if (picture.kind === "curves") {
      for (const curve of picture.curves) {
        add(label(curve), curve.name, { marker: curve.published });
      }
    } else if (picture.kind === "plane") {
      for (const ellipse of picture.ellipses) {
        add(ellipse.name, ellipse.name, { dash: ellipse.dashed ? "dash" : "solid" });
      }
      picture.points.forEach((point, i) => add(point.name, point.name, { symbol: i }));
    } else if (picture.kind === "marginals") {
      for (const series of picture.series) add(series.name, series.name, {});
    }
    return [...found.values()];
  }

  function base(theme, width, height) {
    return {
      width, height, autosize: false, showlegend: false, hovermode: "closest",
      uirevision: "kept",  // a reader's zoom outlives the legend, the slider and the theme
      dragmode: theme.coarse ? false : "zoom",
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: FONT, size: 12, color: theme.muted },
      hoverlabel: { bgcolor: theme.raised, bordercolor: theme.rule, font: { color: theme.ink } },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: theme.muted, activecolor: theme.ink },
      margin: { l: 60, r: 24, t: 14, b: 48 },
    };
  }

  function frame(theme) {
    return {
      gridcolor: theme.grid, linecolor: theme.muted, showline: true, zeroline: false,
      ticks: "outside", ticklen: 4, ticklabeloverflow: "allow", tickcolor: theme.muted, tickfont: { size: 11.5 },
      automargin: true,
    };
  }

  // `room` is how many labels there is room for.
  function axis(said, theme, values, room) {
    const made = { ...frame(theme), title: { text: escapeText(said.label), standoff: 8 } };
    made.type = said.log ? "log" : "linear";
    made.exponentformat = "SI";
    made.tickangle = 0;
    made.nticks = Math.max(3, Math.floor(room));
    if (said.range) {
      made.range = said.log ? said.range.map(Math.log10) : said.range;
      made.autorange = false;
    }
    if (said.log) {
      // Plotly takes powers of ten where a tick stands for more than 0.7 decades, else 1, 2 and 5.
      const usable = values.filter((value) => value > 0);
      const ends = said.range ?? [smallest(usable), largest(usable)];
      const decades = Math.abs(Math.log10(ends[1] / ends[0]));
      const most = decades > 2.2 ? decades / 0.75 : decades > 1 ? decades / 0.5 : 4;
      made.nticks = Math.max(2, Math.floor(Math.min(made.nticks, most)));
      if (decades > 1) made.exponentformat = "power";
      if (decades < 8) made.minor = { ticks: "outside", ticklen: 2, tickcolor: theme.muted };
    }
    return made;
  }

  const smallest = (values) => values.reduce((a, b) => Math.min(a, b), Infinity);
  const largest = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);

  // Plotly reads a little HTML in its texts; ours is none.
  function escapeText(text) {
    return text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  }

  // A closed outline for every stretch where both edges are known; gaps part them.
  function band(curve, floor) {
    const x = [], y = [];
    let run = [];
    const close = () => {
      if (run.length > 1) {
        const back = [...run].reverse();
        x.push(...run.map((i) => curve.x[i]), ...back.map((i) => curve.x[i]), null);
        y.push(...run.map((i) => curve.high[i]), ...back.map((i) => Math.max(curve.low[i], floor)), null);
      }
      run = [];
    };
    curve.x.forEach((_, i) => {
      const known = curve.low[i] !== null && curve.high[i] !== null && curve.high[i] > floor;
      if (known) run.push(i);
      else close();
    });
    close();
    return { x, y };
  }

  function curves(picture, strokes, theme, width, hidden) {
    const height = Math.round(Math.min(460, Math.max(300, width * 0.55)));
    const layout = base(theme, width, height);
    const all = picture.curves.flatMap((curve) => [curve.y, ...(curve.others ?? [])].flat());
    layout.xaxis = axis(picture.x, theme, picture.curves.flatMap((curve) => curve.x), (width - 80) / 70);
    layout.yaxis = axis(picture.y, theme, all.filter((value) => value !== null), (height - 60) / 36);
    const positive = picture.y.log ? smallest(all.filter((value) => value > 0)) : 0;
    const floor = picture.y.log ? (picture.y.range ? Math.min(...picture.y.range) : positive / 2) : -Infinity;
    const data = [];
    for (const curve of picture.curves) {
      const { colour, full, dash, width: thick } = stroke(curve.name, strokes, theme);
      const name = label(curve);
      const common = { name: escapeText(name), legendgroup: name, visible: !hidden.has(name) };
      if (curve.low && curve.high) {
        const outline = band(curve, floor);
        data.push({ ...common, ...outline, type: "scatter", mode: "lines", fill: "toself",
          fillcolor: faint(full, 0.16), line: { width: 0 }, hoverinfo: "skip" });
      }
      if (curve.others?.length) {
        data.push({ ...common, type: "scatter", mode: "lines", hoverinfo: "skip", opacity: 0.4,
          x: curve.others.flatMap(() => [...curve.x, null]),
          y: curve.others.flatMap((line) => [...line, null]),
          line: { color: colour, width: 0.9 } });
      }
      const finite = curve.y.filter((value) => value !== null).length;
      const dense = finite > 1500;  // a thick line would be a smear
      const trace = { ...common, type: "scatter", x: curve.x, y: curve.y };
      if (curve.published) {
        data.push({ ...trace, mode: "markers", cliponaxis: false,
          marker: { symbol: "circle", size: 8, color: theme.ground, line: { width: 1.75, color: colour } } });
      } else {
        data.push({ ...trace, mode: finite < 12 ? "lines+markers" : "lines",
          line: { color: colour, width: dense ? thick / 2 : thick, dash },
          marker: { color: colour, size: 6 } });
      }
    }
    // Plotly draws in order: what stands out over the rest, what was published over all.
    const rank = (trace) => (trace.mode === "markers" ? 2 : strokes[trace.legendgroup]?.strong ? 1 : 0);
    data.sort((a, b) => rank(a) - rank(b));
    return { data, layout };
  }

  // Plotly's contours are evenly spaced, so heights are told as places among the levels.
  function places(density, levels) {
    const last = levels.length - 1;
    const place = (height) => {
      if (height === null) return null;
      if (height <= levels[0]) {
        return levels[0] > 0 ? Math.max(-1, height / levels[0] - 1) : -0.5;
      }
      let i = 0;
      while (i < last && height > levels[i + 1]) i += 1;
      if (i === last) return last + Math.min(0.9, height / levels[last] - 1);
      return i + (height - levels[i]) / (levels[i + 1] - levels[i]);
    };
    return density.map((row) => row.map(place));
  }

  function contours(picture, density, colour, theme, thin) {
    const count = picture.levels.length;
    if (!count) return [];
    return [{
      type: "contour", x: picture.x, y: picture.y, z: places(density, picture.levels),
      autocontour: false, contours: { start: 0, end: count - 1, size: 1, coloring: "fill" },
      zmin: -1, zmax: count, showscale: false, hoverinfo: "skip",
      colorscale: [[0, theme.ground], [0.999 / (count + 1), theme.ground],
        [1 / (count + 1), mixed(theme.ground, colour, 0.1)], [1, mixed(theme.ground, colour, 0.72)]],
      line: { width: thin ? 0.6 : 0.9, color: mixed(theme.ground, colour, 0.85), smoothing: 0.6 },
    }];
  }

  function plane(picture, theme, width, most) {
    const [left, right] = [picture.x[0], picture.x.at(-1)];
    const [bottom, top] = [picture.y[0], picture.y.at(-1)];
    const shape = Math.abs((top - bottom) / (right - left));
    const inner = Math.min(width - 70, most / shape);
    const layout = base(theme, Math.max(Math.round(inner) + 70, Math.min(width, 220)), Math.round(inner * shape) + 56);
    layout.xaxis = { ...frame(theme), range: [left, right], constrain: "domain", showgrid: false,
      title: { text: escapeText(picture.xLabel), standoff: 6 }, nticks: 7 };
    layout.yaxis = { ...frame(theme), range: [bottom, top], constrain: "domain", showgrid: false,
      scaleanchor: "x", scaleratio: 1, title: { text: escapeText(picture.yLabel), standoff: 6 }, nticks: 7 };
    layout.margin = { l: 52, r: 16, t: 12, b: 44 };
    return layout;
  }

  function ellipses(picture, strokes, theme, width, hidden) {
    const layout = plane(picture, theme, width, 520);
    const data = contours(picture, picture.density, theme.density, theme, false);
    for (const ellipse of picture.ellipses) {
      const { colour, width: thick } = stroke(ellipse.name, strokes, theme);
      const common = { type: "scatter", name: escapeText(ellipse.name), legendgroup: ellipse.name,
        visible: !hidden.has(ellipse.name) };
      data.push({ ...common, x: ellipse.x, y: ellipse.y, mode: "lines", hoverinfo: "name",
        line: { color: colour, width: thick, dash: ellipse.dashed ? "dash" : "solid" } });
      data.push({ ...common, x: [ellipse.mean[0]], y: [ellipse.mean[1]], mode: "markers",
        marker: { symbol: "cross-thin", size: 9, line: { color: colour, width: 2 } } });
    }
    picture.points.forEach((point, i) => {
      const { colour } = stroke(point.name, strokes, theme);
      data.push({ type: "scatter", name: escapeText(point.name), legendgroup: point.name,
        visible: !hidden.has(point.name), x: [point.x], y: [point.y], mode: "markers",
        marker: { symbol: MARKS[i % MARKS.length], size: 10, color: colour,
          line: { color: theme.ground, width: 1 } } });
    });
    return { data, layout };
  }

  // Panel -1 is the exact density.
  function panel(picture, index, theme, width, small) {
    const exact = index < 0;
    const density = exact ? picture.exact : picture.panels[index].density;
    const data = contours(picture, density, exact ? theme.density : theme.hues.iblr, theme, small);
    const layout = plane(picture, theme, width, 420);
    if (small) {
      const shape = Math.abs((picture.y.at(-1) - picture.y[0]) / (picture.x.at(-1) - picture.x[0]));
      const height = Math.round(Math.min(1.5, Math.max(0.4, shape)) * width);
      Object.assign(layout, { width, height, margin: { l: 1, r: 1, t: 1, b: 1 } });
      for (const side of [layout.xaxis, layout.yaxis]) {
        Object.assign(side, { showticklabels: false, ticks: "", title: undefined,
          linecolor: theme.rule, mirror: true, automargin: false });
      }
    }
    return { data, layout };
  }

  function marginal(picture, coordinate, strokes, theme, width, hidden) {
    const layout = base(theme, width, 136);
    layout.margin = { l: 4, r: 4, t: 4, b: 22 };
    layout.dragmode = false;
    layout.xaxis = { ...frame(theme), showgrid: false, nticks: 5, automargin: false, fixedrange: true };
    layout.yaxis = { visible: false, rangemode: "tozero", fixedrange: true };
    const data = picture.series.map((series, i) => {
      const { colour, full, dash, strong } = stroke(series.name, strokes, theme);
      return { type: "scatter", mode: "lines", name: escapeText(series.name), legendgroup: series.name,
        visible: !hidden.has(series.name), x: picture.points[coordinate], y: series.densities[coordinate],
        line: { color: colour, dash, width: strong ? 2.25 : 1.5 }, hoverinfo: "name",
        ...(i === 0 ? { fill: "tozeroy", fillcolor: faint(full, 0.1) } : {}) };
    });
    return { data, layout };
  }

  return { curves, ellipses, panel, marginal, entries, stroke, MARKS };
})();
