"use strict";
// Draws the charts in the colours of the theme, and again when it changes.
(() => {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const system = matchMedia("(prefers-color-scheme: dark)");
  const font = 'system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif';
  const config = { displayModeBar: false, responsive: true, scrollZoom: false, doubleClick: "reset" };
  let chosen = null;

  const theme = () => chosen ?? (system.matches ? "dark" : "light");

  function colours() {
    const style = getComputedStyle(root);
    return (name) => style.getPropertyValue(`--${name}`).trim();
  }

  // "@ink" becomes the theme's ink. Copies: plotly writes into what it is given.
  function coloured(value, colour) {
    if (typeof value === "string") return /^@[a-z]+$/.test(value) ? colour(value.slice(1)) : value;
    if (Array.isArray(value)) return value.map((each) => coloured(each, colour));
    if (value === null || typeof value !== "object") return value;
    if (value.bdata) return { ...value };
    return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, coloured(v, colour)]));
  }

  function framed(layout, element, colour) {
    const narrow = element.clientWidth < 520;
    const axis = {
      color: colour("muted"), gridcolor: colour("grid"), linecolor: colour("grid"),
      zerolinecolor: colour("muted"), ticks: "outside", tickcolor: colour("grid"), ticklen: 4,
      title: { standoff: 8, font: { size: 13, color: colour("muted") } },
      spikecolor: colour("muted"), spikethickness: 1, zeroline: false,
    };
    const own = (axisOf) => Boolean(axisOf.title?.text);
    const frame = {
      ...layout,
      autosize: true,
      showlegend: false,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: font, size: narrow ? 11 : 13, color: colour("ink") },
      margin: { l: narrow ? 60 : 66, r: narrow ? 14 : 18, t: 10, b: 48, pad: 0 },
      // A finger that scrolls the page must not drag a chart.
      dragmode: narrow ? false : "zoom",
      hoverlabel: {
        bgcolor: colour("paper"), bordercolor: colour("muted"),
        font: { family: font, size: 12, color: colour("ink") },
      },
    };
    for (const name of Object.keys(layout).filter((key) => /^[xy]axis/.test(key))) {
      const given = layout[name];
      frame[name] = { ...axis, ...given, title: { ...axis.title, ...(given.title ?? {}) } };
      if (name[0] === "x") {
        frame[name].showgrid = false;
        if (narrow && !given.dtick && !given.tickvals) frame[name].nticks = 5;
      }
    }
    if (frame.yaxis?.showticklabels === false) {
      Object.assign(frame.yaxis, { ticks: "", showgrid: false, showline: false });
      frame.margin.l = own(layout.yaxis) ? 34 : 4;
    }
    return frame;
  }

  function draw(chart) {
    const element = document.getElementById(chart.id);
    const colour = colours();
    const data = coloured(chart.data, colour);
    return Plotly.react(element, data, framed(coloured(chart.layout, colour), element, colour), config);
  }

  function recolour() {
    button.textContent = theme() === "dark" ? "Light" : "Dark";
    charts.forEach(draw);
  }

  button.addEventListener("click", () => {
    chosen = theme() === "dark" ? "light" : "dark";
    root.dataset.theme = chosen;
    recolour();
  });
  system.addEventListener("change", () => {
    if (chosen === null) recolour();
  });
  // Paper is white.
  let before = null;
  addEventListener("beforeprint", () => {
    before = chosen;
    root.dataset.theme = chosen = "light";
    recolour();
  });
  addEventListener("afterprint", () => {
    chosen = before;
    if (chosen === null) delete root.dataset.theme;
    else root.dataset.theme = chosen;
    recolour();
  });

  // One after the other, so that the first are seen before the last are drawn.
  button.textContent = theme() === "dark" ? "Light" : "Dark";
  function next(index) {
    if (index === charts.length) {
      root.dataset.drawn = String(Math.round(performance.now()));
      return;
    }
    draw(charts[index]);
    setTimeout(next, 0, index + 1);
  }
  next(0);
})();
