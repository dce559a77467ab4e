"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const canvas = document.getElementById("canvas"), tip = document.getElementById("tip"), plot = document.getElementById("plot");
  const pen = canvas.getContext("2d");
  const GUTTER = 150, RIGHT = 8;
  const [START, LENGTH, BUSY, STARVED, BLOCKED, BYTES, COUNT, LANE, LABEL, NUMBER] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9];
  const whole = [0, Math.max(1, data.total)];
  let view = whole.slice(), rows = [], height = 0, width = 0, selection = null;

  const color = name => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  const clamp = (value, low, high) => Math.min(high, Math.max(low, value));
  const xOf = at => GUTTER + (at - view[0]) / (view[1] - view[0]) * (width - GUTTER - RIGHT);
  const atOf = x => view[0] + (x - GUTTER) / (width - GUTTER - RIGHT) * (view[1] - view[0]);

  const time = us => us >= 1e6 ? (us / 1e6).toFixed(us >= 1e7 ? 2 : 3) + " s" : us >= 1e3 ? (us / 1e3).toFixed(us >= 1e5 ? 0 : 2) + " ms" : us.toFixed(0) + " µs";
  const size = bytes => {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let unit = 0;
    while (bytes >= 1024 && unit < units.length - 1) { bytes /= 1024; unit++; }
    return bytes.toFixed(unit && bytes < 100 ? 1 : 0) + " " + units[unit];
  };
  const amount = (chart, value) => chart === data.bytesChart ? size(value) + "/s" : String(Math.round(value * 10) / 10);

  // Every way of coding has one colour on the whole page.
  const labels = [];
  for (const stage of data.stages) for (const track of stage.tracks) for (const label of track.labels) if (!labels.includes(label)) labels.push(label);
  // The first colour is that of work without a label.
  const labelPaint = label => "c" + (1 + labels.indexOf(label) % 7);
  const labelColor = label => label === "failed" ? color("bad") : labels.includes(label) ? color(labelPaint(label)) : color("busy");

  const legend = document.getElementById("legend");
  const addLegend = (name, paint) => {
    const item = document.createElement("span"), square = document.createElement("i");
    square.dataset.paint = paint;
    item.append(square, name);
    legend.append(item);
  };
  addLegend(labels.length ? "at work, not coding" : "at work", "busy");
  for (const label of labels) addLegend("at work: " + label, labelPaint(label));
  addLegend("no input: the stage before is slower", "starved");
  addLegend("no room: the stage behind is slower", "blocked");

  const charts = [];
  for (const series of data.series) {
    let chart = charts.find(chart => chart.title === series.chart);
    if (!chart) charts.push(chart = { title: series.chart, series: [] });
    chart.series.push(series);
  }

  function layOut() {
    rows = [];
    let y = 0;
    const row = (kind, tall, rest) => { rows.push(Object.assign({ kind, y, tall }, rest)); y += tall; };
    row("axis", 24, {});
    row("phases", 22, { name: "phases" });
    if (data.marks.length) row("marks", 16, { name: "marks" });
    for (const stage of data.stages) {
      row("gap", 10, {});
      const many = stage.tracks.length > 1;
      row("stage", many ? 40 : 26, { name: stage.name, stage, tracks: stage.tracks, bold: true });
      if (many) for (const track of stage.tracks) row("track", stage.tracks.length > 24 ? 8 : 15, { name: track.name, stage, tracks: [track] });
      for (const track of stage.requests) row("track", stage.requests.length > 12 ? 6 : 9, { name: track.name, stage, tracks: [track], isRequest: true });
    }
    for (const chart of charts) {
      row("gap", 10, {});
      row("chart", 84, { name: chart.title, chart, bold: true });
    }
    row("gap", 6, {});
    height = y;
  }

  // Index of the first span that ends after `at`.
  function firstSpan(spans, at) {
    let low = 0, high = spans.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (spans[middle][START] + spans[middle][LENGTH] <= at) low = middle + 1; else high = middle;
    }
    return low;
  }

  // For each column, how much of each colour: spans are spread evenly over their length.
  function columns(tracks, count) {
    const perColumn = (view[1] - view[0]) / count;
    const paints = new Map();
    const of = paint => { if (!paints.has(paint)) paints.set(paint, new Float32Array(count)); return paints.get(paint); };
    for (const track of tracks) {
      const spans = track.spans;
      for (let index = firstSpan(spans, view[0]); index < spans.length && spans[index][START] < view[1]; index++) {
        const span = spans[index], length = Math.max(1, span[LENGTH]);
        const busyPaint = span[LABEL] < 0 ? cached("busy") : cachedLabel(track.labels[span[LABEL]]);
        const sum = Math.max(span[BUSY] + span[STARVED] + span[BLOCKED], 1);
        const shares = [[busyPaint, span[BUSY] / sum], [cached("blocked"), span[BLOCKED] / sum], [cached("starved"), span[STARVED] / sum]];
        const from = Math.max(0, (span[START] - view[0]) / perColumn), to = Math.min(count, (span[START] + length - view[0]) / perColumn);
        for (let column = Math.floor(from); column < to; column++) {
          const part = Math.min(to, column + 1) - Math.max(from, column);
          for (const [paint, share] of shares) if (share > 0) of(paint)[column] += part * share / tracks.length;
        }
      }
    }
    return paints;
  }
  let cache = {};
  const cached = name => cache[name] ??= color(name);
  const cachedLabel = label => cache["label " + label] ??= labelColor(label);

  function drawColumns(row) {
    const bottom = row.y + row.tall - 1, tall = row.tall - 2;
    pen.fillStyle = cached("panel");
    pen.fillRect(GUTTER, row.y + 1, width - GUTTER - RIGHT, tall);
    // Several threads together are a mean: single chunks would only flicker.
    const wide = row.tracks.length > 1 ? 6 : 1, count = Math.max(1, Math.floor((width - GUTTER - RIGHT) / wide));
    const step = (width - GUTTER - RIGHT) / count, paints = columns(row.tracks, count);
    const late = [cached("blocked"), cached("starved")];
    const order = [...paints.keys()].filter(paint => !late.includes(paint)).concat(late.filter(paint => paints.has(paint)));
    const base = new Float32Array(count);
    for (const paint of order) {
      const values = paints.get(paint);
      pen.fillStyle = paint;
      for (let column = 0; column < values.length; column++) {
        if (!values[column]) continue;
        const top = Math.min(1, base[column] + values[column]);
        const y0 = bottom - base[column] * tall, y1 = bottom - top * tall;
        const x = Math.round(GUTTER + column * step);
        pen.fillRect(x, y1, Math.round(GUTTER + (column + 1) * step) - x, y0 - y1);
        base[column] = top;
      }
    }
    if (row.tracks.length > 1) return;
    // Neighbouring pieces of work are told apart once there is room.
    const spans = row.tracks[0].spans;
    pen.fillStyle = cached("back");
    for (let index = firstSpan(spans, view[0]); index < spans.length && spans[index][START] < view[1]; index++) {
      if (xOf(spans[index][START] + spans[index][LENGTH]) - xOf(spans[index][START]) > 5) pen.fillRect(Math.round(xOf(spans[index][START])), row.y + 1, 1, tall);
    }
  }

  function clip(text, room) {
    if (pen.measureText(text).width <= room) return text;
    while (text.length > 1 && pen.measureText(text + "…").width > room) text = text.slice(0, -1);
    return text.length > 1 ? text + "…" : "";
  }

  function drawAxis(row) {
    const step = [1, 2, 5].flatMap(n => [...Array(9).keys()].map(power => n * 10 ** power)).sort((a, b) => a - b)
      .find(step => step / (view[1] - view[0]) * (width - GUTTER - RIGHT) >= 80) ?? 1e9;
    pen.textAlign = "center";
    for (let at = Math.ceil(view[0] / step) * step; at <= view[1]; at += step) {
      const x = Math.round(xOf(at)) + .5;
      pen.strokeStyle = cached("line");
      pen.beginPath(); pen.moveTo(x, row.tall - 4); pen.lineTo(x, height); pen.stroke();
      pen.fillStyle = cached("soft");
      const text = step >= 1e6 ? at / 1e6 + " s" : step >= 1e5 ? (at / 1e6).toFixed(1) + " s" : step >= 1e3 ? (at / 1e3).toFixed(0) + " ms" : at + " µs";
      pen.fillText(text, x, row.y + 14);
    }
    pen.textAlign = "left";
  }

  function drawPhases(row) {
    data.phases.forEach(([name, start, end], index) => {
      const x0 = Math.max(GUTTER, xOf(start)), x1 = Math.min(width - RIGHT, xOf(end));
      if (x1 <= x0) return;
      pen.globalAlpha = index % 2 ? .55 : .85;
      pen.fillStyle = cached("phase");
      pen.fillRect(x0, row.y + 1, Math.max(1, x1 - x0 - 1), row.tall - 3);
      pen.globalAlpha = 1;
      pen.fillStyle = cached("text");
      pen.fillText(clip(name, x1 - x0 - 8), x0 + 4, row.y + 15);
    });
  }

  const markColor = kind => kind === "first" || kind === "last" ? cached("busy") : cached("bad");
  function drawMarks(row) {
    for (const [at, kind] of data.marks) {
      const x = xOf(at);
      if (x < GUTTER || x > width - RIGHT) continue;
      pen.fillStyle = markColor(kind);
      pen.beginPath(); pen.moveTo(x, row.y + 2); pen.lineTo(x + 4, row.y + 8); pen.lineTo(x, row.y + 14); pen.lineTo(x - 4, row.y + 8); pen.fill();
    }
  }

  function drawChart(row) {
    const top = row.y + 16, bottom = row.y + row.tall - 2;
    const most = Math.max(1e-9, ...row.chart.series.map(series => series.points.reduce((most, point) => Math.max(most, point[1]), 0)));
    row.most = most;
    pen.fillStyle = cached("panel");
    pen.fillRect(GUTTER, row.y, width - GUTTER - RIGHT, row.tall);
    pen.save();
    pen.beginPath(); pen.rect(GUTTER, row.y, width - GUTTER - RIGHT, row.tall); pen.clip();
    row.chart.series.forEach((series, index) => {
      pen.strokeStyle = cached("c" + index % 8);
      pen.lineWidth = 1.5;
      pen.beginPath();
      for (const [at, value] of series.points) pen.lineTo(xOf(at), bottom - value / most * (bottom - top));
      pen.stroke();
    });
    pen.lineWidth = 1;
    pen.restore();
    let x = GUTTER + 6;
    row.chart.series.forEach((series, index) => {
      pen.fillStyle = cached("c" + index % 8);
      pen.fillRect(x, row.y + 5, 8, 8);
      pen.fillStyle = cached("text");
      pen.fillText(series.name, x + 12, row.y + 13);
      x += pen.measureText(series.name).width + 28;
    });
  }

  function draw() {
    cache = {};
    for (const square of legend.querySelectorAll("i")) square.style.background = color(square.dataset.paint);
    width = Math.max(500, plot.clientWidth);
    const scale = window.devicePixelRatio || 1;
    canvas.width = width * scale;
    canvas.height = height * scale;
    canvas.style.height = height + "px";
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    const font = getComputedStyle(document.body).fontFamily;
    pen.font = "11px " + font;
    for (const row of rows) {
      if (row.kind === "axis") drawAxis(row);
      if (row.kind === "phases") drawPhases(row);
      if (row.kind === "marks") drawMarks(row);
      if (row.tracks) drawColumns(row);
      if (row.kind === "chart") drawChart(row);
      if (row.name && row.tall >= 12) {
        pen.font = (row.bold ? "600 12px " : "11px ") + font;
        pen.fillStyle = row.bold ? cached("text") : cached("soft");
        pen.fillText(clip(row.name, GUTTER - 14 - (row.bold ? 0 : 10)), row.bold ? 0 : 10, row.y + Math.min(row.tall, 28) / 2 + 4);
        if (row.kind === "chart") {
          pen.font = "11px " + font;
          pen.fillStyle = cached("soft");
          pen.fillText("up to " + amount(row.chart.title, row.most), 0, row.y + 34);
        }
        pen.font = "11px " + font;
      }
    }
    if (selection) {
      pen.globalAlpha = .2;
      pen.fillStyle = cached("busy");
      pen.fillRect(Math.min(...selection), 0, Math.abs(selection[1] - selection[0]), height);
      pen.globalAlpha = 1;
    }
  }

  function show(start, end) {
    const length = clamp(end - start, 20, whole[1]);
    start = clamp(start, 0, whole[1] - length);
    view = [start, start + length];
    draw();
  }

  function spanText(row, track, span) {
    const lines = [track.name + ", " + time(span[START]) + " + " + time(span[LENGTH])];
    const sum = Math.max(1, span[BUSY] + span[STARVED] + span[BLOCKED]);
    const label = span[LABEL] < 0 ? "" : track.labels[span[LABEL]];
    const lane = span[LANE] < 0 ? "" : data.lanes[span[LANE]] ?? "lane " + span[LANE];
    const some = (us, text) => { if (us > 0) lines.push(us / sum > .995 ? text : (us / sum * 100).toFixed(0) + " % " + text); };
    some(span[BUSY], ["at work", label, lane].filter(Boolean).join(", "));
    some(span[STARVED], "no input: " + row.stage.starved);
    some(span[BLOCKED], "no room: " + row.stage.blocked);
    if (span[NUMBER] >= 0) lines.push((row.stage.name === "upload" ? "part " : "frames from ") + span[NUMBER] + (span[COUNT] > 1 ? " and others" : ""));
    if (span[BYTES] > 0) {
      const pieces = span[COUNT] > 1 ? " in " + span[COUNT] + " pieces" : "";
      lines.push(size(span[BYTES]) + pieces + (span[BUSY] > 0 ? ", " + size(span[BYTES] / span[BUSY] * 1e6) + "/s" : ""));
    }
    return lines.join("\n");
  }

  function textAt(x, y) {
    const row = rows.find(row => y >= row.y && y < row.y + row.tall), at = atOf(x);
    if (!row || x < GUTTER || x > width - RIGHT) return "";
    if (row.kind === "phases") {
      const phase = data.phases.find(([, start, end]) => at >= start && at < end);
      return phase ? phase[0] + ", " + time(phase[2] - phase[1]) : "";
    }
    if (row.kind === "marks") {
      const near = data.marks.filter(mark => Math.abs(xOf(mark[0]) - x) < 5).slice(0, 8);
      return near.map(mark => time(mark[0]) + " " + mark[1] + ": " + mark[2]).join("\n");
    }
    if (row.kind === "chart") {
      const lines = row.chart.series.map(series => {
        const near = series.points.reduce((best, point) => !best || Math.abs(point[0] - at) < Math.abs(best[0] - at) ? point : best, null);
        return near ? series.name + ": " + amount(row.chart.title, near[1]) : "";
      });
      return time(at) + "\n" + lines.filter(Boolean).join("\n");
    }
    if (!row.tracks) return "";
    const found = row.tracks.map(track => {
      const span = track.spans[firstSpan(track.spans, at)];
      return span && span[START] <= at ? spanText(row, track, span) : "";
    });
    const texts = found.filter(Boolean);
    return texts.slice(0, 4).join("\n\n") + (texts.length > 4 ? "\n\n…" : "");
  }

  const place = event => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
  canvas.addEventListener("wheel", event => {
    const [x] = place(event);
    // Beside the plot the wheel moves the page.
    if (x < GUTTER) return;
    event.preventDefault();
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      const move = (event.deltaX || event.deltaY) / width * (view[1] - view[0]);
      return show(view[0] + move, view[1] + move);
    }
    const at = atOf(x), factor = Math.exp(clamp(event.deltaY, -200, 200) * .002);
    show(at - (at - view[0]) * factor, at + (view[1] - at) * factor);
  }, { passive: false });
  let drag = null;
  canvas.addEventListener("pointerdown", event => {
    const [x] = place(event);
    if (x < GUTTER) return;
    drag = { x, view: view.slice(), isMove: event.shiftKey };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", event => {
    const [x, y] = place(event);
    if (drag && drag.isMove) {
      const move = (drag.x - x) / (width - GUTTER - RIGHT) * (drag.view[1] - drag.view[0]);
      show(drag.view[0] + move, drag.view[1] + move);
    } else if (drag) {
      selection = [drag.x, clamp(x, GUTTER, width - RIGHT)];
      draw();
    }
    const text = drag ? "" : textAt(x, y);
    tip.hidden = !text;
    tip.textContent = text;
    tip.style.left = Math.min(x + 14, width - 300) + "px";
    tip.style.top = y + 18 + "px";
  });
  canvas.addEventListener("pointerup", () => {
    const chosen = selection;
    drag = selection = null;
    if (chosen && Math.abs(chosen[1] - chosen[0]) > 4) show(atOf(Math.min(...chosen)), atOf(Math.max(...chosen)));
    else draw();
  });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  const all = () => show(...whole);
  canvas.addEventListener("dblclick", all);
  document.getElementById("all").addEventListener("click", all);
  document.getElementById("theme").addEventListener("click", () => {
    const root = document.documentElement, isDark = getComputedStyle(root).getPropertyValue("--back").trim() === "#12161c";
    root.classList.toggle("dark", !isDark);
    root.classList.toggle("light", isDark);
    draw();
  });
  window.addEventListener("resize", draw);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  layOut();
  draw();
})();
