"use strict";
(() => {
  const content = JSON.parse(document.getElementById("content").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const ink = (curve) => (dark.matches ? curve.dark : curve.light);

  const traces = (panel, hidden) => panel.curves.flatMap((curve) => {
    const visible = !hidden.has(curve.label);
    const common = { x: curve.x, visible, showlegend: false, line: { color: ink(curve) } };
    const line = {
      ...common, y: curve.y, name: curve.label, connectgaps: false,
      mode: curve.points ? "lines+markers" : "lines",
      line: { color: ink(curve), width: 2, dash: curve.dashed ? "dash" : "solid" },
      marker: { symbol: curve.marker, size: 6 },
    };
    if (!curve.low) return [line];
    const edge = { ...common, mode: "lines", line: { width: 0 }, hoverinfo: "skip" };
    const band = [
      { ...edge, y: curve.low },
      { ...edge, y: curve.high, fill: "tonexty", fillcolor: ink(curve) + "26" },
    ];
    return [...band, line];
  });

  // Label 2 and 5 too only if the axis spans few powers of ten; on longer axes the labels would overlap.
  const ticks = (values) => {
    const logs = values.filter((value) => value > 0).map(Math.log10);
    return { dtick: logs.length > 0 && Math.max(...logs) - Math.min(...logs) > 2.5 ? 1 : "D2" };
  };

  const axis = (title, log, values) => ({
    title: { text: title, standoff: 6 }, type: log ? "log" : "linear", automargin: true, zeroline: false,
    gridcolor: css("--line"), linecolor: css("--line"), exponentformat: "power", ...(log ? ticks(values) : {}),
  });

  const layout = (panel) => ({
    title: { text: panel.title, x: 0.02, xanchor: "left", font: { size: 14 } },
    xaxis: axis(panel.x_label, panel.log_x, panel.curves.flatMap((curve) => curve.x)),
    yaxis: axis(panel.y_label, panel.log_y, panel.curves.flatMap((curve) => curve.y)),
    margin: { l: 60, r: 10, t: 34, b: 46 }, hovermode: "closest",
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 12, color: css("--ink") },
    hoverlabel: { namelength: -1 },
  });

  // Dragging zooms and a double click resets; plotly's button bar would cover the titles.
  const options = { responsive: true, displayModeBar: false };
  const redraws = [];

  for (const figure of content) {
    const root = document.getElementById(figure.name);
    const legend = root.querySelector(".legend");
    const panels = [...root.querySelectorAll(".panel")];
    const hidden = new Set();
    const draw = () => Promise.all(
      figure.panels.map((panel, i) => Plotly.react(panels[i], traces(panel, hidden), layout(panel), options)),
    );
    const curves = new Map(figure.panels.flatMap((panel) => panel.curves.map((curve) => [curve.label, curve])));
    const lines = [];
    for (const [label, curve] of curves) {
      const button = document.createElement("button");
      const line = document.createElement("i");
      line.className = curve.dashed ? "dashed" : "";
      button.type = "button";
      button.setAttribute("aria-pressed", "true");
      button.append(line, label);
      button.addEventListener("click", () => {
        hidden.has(label) ? hidden.delete(label) : hidden.add(label);
        button.setAttribute("aria-pressed", String(!hidden.has(label)));
        draw();
      });
      legend.append(button);
      lines.push(() => { line.style.borderColor = ink(curve); });
    }
    const redraw = () => { lines.forEach((paint) => paint()); return draw(); };
    redraws.push(redraw);
  }
  const all = () => Promise.all(redraws.map((redraw) => redraw()));
  // Tests wait for this attribute.
  all().then(() => { document.documentElement.dataset.drawn = String(redraws.length); });
  dark.addEventListener("change", all);
})();
