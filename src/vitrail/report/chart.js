// Draws the curves of the page anew from their points: values under the pointer, and a stretch of steps by dragging.
"use strict";
(() => {
  const HIGH = 250, RIGHT = 12, TOP = 30, BOTTOM = 36, GAP = 14;
  const page = document.createElement("template");
  page.innerHTML = "<svg></svg>"; // so that no address has to stand here
  const NS = page.content.firstChild.namespaceURI;
  let busy = 0; // charts that are looked at closely: the page does not renew itself then

  const make = (name, given, parent, text) => {
    const node = document.createElementNS(NS, name);
    for (const key in given) node.setAttribute(key, given[key]);
    if (text !== undefined) node.textContent = text;
    if (parent) parent.appendChild(node);
    return node;
  };

  const paint = (node, line) => { node.style.setProperty("--colour", line.colour); return node; };

  const word = (name, text, parent) => {
    const node = document.createElement(name);
    if (text) node.textContent = text;
    if (parent) parent.append(node);
    return node;
  };

  const dot = (line, parent) => {
    const node = paint(word("i", "", parent), line);
    if (line.dashed) node.className = "ring";
    return node;
  };

  const write = (value) => {
    const size = Math.abs(value);
    if (size >= 1e5 || (size > 0 && size < 1e-3)) return value.toExponential(2).replace("e+", "e");
    return String(Number(value.toPrecision(4)));
  };

  const label = (value) => {
    const size = Math.abs(value), power = size < 1000 ? 0 : Math.min(Math.floor(Math.log10(size) / 3), 4);
    const number = Number((value / 1000 ** power).toPrecision(4));
    return (size > 0 && size < 1e-3 ? value.toExponential().replace(/(\.\d\d)\d*/, "$1") : number) + ["", "k", "M", "G", "T"][power];
  };

  const ticks = (low, high, most) => {
    const rough = (high - low) / most || 1, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].map((n) => n * power).find((n) => n >= rough * 0.999);
    const out = [];
    for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9 && out.length < 99; n++) out.push(Number((n * step).toPrecision(12)));
    return out;
  };

  const logTicks = (low, high) => {
    const out = [], wide = Math.log10(high / low) > 3;
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
      for (const n of wide ? [1] : [1, 2, 5]) {
        const tick = n * 10 ** power;
        if (tick >= low && tick <= high) out.push(tick);
      }
    return out;
  };

  const nearest = (xs, x) => {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] < x) low = middle; else high = middle;
    }
    return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
  };

  const extent = (data) => {
    const all = data.panels.flatMap((panel) => panel.lines.flatMap((line) => line.x));
    const whole = [Math.min(...all), Math.max(...all)];
    if (whole[0] === whole[1]) { whole[0] -= 0.5; whole[1] += 0.5; }
    return whole;
  };

  const chart = (card, given) => {
    let data = given, whole = extent(data), span = whole, box = null, held = false;
    const svg = make("svg", { class: "chart", role: "img", "aria-label": data.title, tabindex: 0 });
    const tip = word("div"), back = word("button", "show all");
    tip.className = "tip"; tip.hidden = true;
    back.className = "back"; back.type = "button"; back.hidden = true;
    const named = data.panels.flatMap((panel) => panel.lines).filter((line) => line.name);
    card.append(svg, tip, back);
    if (named.length) {
      const legend = word("div", "", card);
      legend.className = "legend";
      for (const line of named.slice(0, 16)) {
        const entry = word("span", "", legend);
        dot(line, entry).style.opacity = line.pale ? 0.45 : 1;
        entry.append(line.name);
      }
    }
    card.querySelector("img").hidden = true;

    const zoom = (to) => {
      const closer = to !== whole;
      if (closer !== (span !== whole)) busy += closer ? 1 : -1;
      span = to; back.hidden = !closer; draw();
    };

    const timed = () => !["step", "samples"].includes(data.over);

    const place = (x) => {
      const number = timed() ? write(x) : x.toLocaleString("en");
      return data.over === "step" ? `step ${number}` : `${number} ${data.over}`;
    };

    const choose = (over) => {
      if (span !== whole) busy -= 1;
      data = given.others.find((other) => other.over === over) || given;
      span = whole = extent(data); back.hidden = true; hide(); draw();
    };

    const scale = (panel, high) => {
      const seen = [];
      for (const line of panel.lines) line.x.forEach((x, i) => { if (x >= span[0] && x <= span[1]) seen.push(line.y[i]); });
      if (!seen.length) panel.lines.forEach((line) => seen.push(...line.y));
      let low = Math.min(...seen), most = Math.max(...seen);
      const log = panel.log && low > 0;
      if (log) { low /= 1.1; most *= 1.1; }
      else {
        const zero = panel.zero && span === whole, pad = (most - low || Math.abs(most) || 1) * 0.06;
        low = zero ? Math.min(0, low) : low - pad;
        most += pad;
      }
      return { low, most, log, marks: log ? logTicks(low, most) : ticks(low, most, high / 36) };
    };

    const draw = () => {
      const wide = Math.max(card.clientWidth - 24, 260);
      svg.setAttribute("viewBox", `0 0 ${wide} ${HIGH}`);
      svg.replaceChildren();
      make("text", { x: 4, y: 15, class: "title" }, svg, data.title);
      const shares = data.panels.length > 1 ? [2 / 3, 1 / 3] : [1];
      const room = HIGH - TOP - BOTTOM - GAP * (shares.length - 1);
      const scales = data.panels.map((panel, number) => scale(panel, room * shares[number]));
      const longest = Math.max(...scales.flatMap((one) => one.marks.map((mark) => label(mark).length)));
      const left = Math.max(48, 27 + 6.4 * longest), width = wide - left - RIGHT;
      const across = (x) => left + ((x - span[0]) / (span[1] - span[0])) * width;
      const steps = ticks(span[0], span[1], Math.max(2, width / 80)).filter((step) => timed() || Number.isInteger(step));
      let top = TOP;
      box = { wide, left, width, across, panels: [] };
      data.panels.forEach((panel, number) => {
        const high = room * shares[number], { low, most, log, marks } = scales[number];
        const begin = top;
        const up = log
          ? (y) => begin + high * (1 - Math.log(y / low) / Math.log(most / low))
          : (y) => begin + high * (1 - (y - low) / (most - low));
        for (const tick of marks) {
          make("line", { x1: left, x2: wide - RIGHT, y1: up(tick), y2: up(tick), class: "grid" }, svg);
          make("text", { x: left - 6, y: up(tick) + 3.5, class: "tick", "text-anchor": "end" }, svg, label(tick));
        }
        for (const step of steps) {
          make("line", { x1: across(step), x2: across(step), y1: top, y2: top + high, class: "grid" }, svg);
          if (number === data.panels.length - 1)
            make("text", { x: across(step), y: top + high + 15, class: "tick", "text-anchor": "middle" }, svg, label(step));
        }
        make("text", { x: 11, y: top + high / 2, class: "tick", "text-anchor": "middle",
          transform: `rotate(-90 11 ${top + high / 2})` }, svg, panel.label);
        const frame = { x: left - 4, y: top - 4, width: width + 8, height: high + 8 };
        const inner = make("svg", { ...frame, viewBox: Object.values(frame).join(" "), overflow: "hidden" }, svg);
        for (const line of panel.lines) {
          const points = line.x.map((x, i) => `${across(x).toFixed(1)},${up(line.y[i]).toFixed(1)}`);
          const style = { class: "line", opacity: line.pale ? 0.4 : 1 };
          if (line.dashed) style["stroke-dasharray"] = "5 4";
          if (line.joined && points.length > 1) paint(make("polyline", { points: points.join(" "), ...style }, inner), line);
          if (line.dots || points.length === 1)
            for (const point of points) {
              const [cx, cy] = point.split(",");
              paint(make("circle", { cx, cy, r: 2.6, class: "dot" }, inner), line);
            }
        }
        box.panels.push({ panel, up });
        top += high + GAP;
      });
      make("text", { x: left + width / 2, y: HIGH - 4, class: "tick", "text-anchor": "middle" }, svg, data.over);
      box.mark = make("g", { class: "mark" }, svg);
      box.drag = make("rect", { y: TOP, height: HIGH - TOP - BOTTOM, class: "drag", width: 0 }, svg);
    };

    const step = (event) => {
      const rect = svg.getBoundingClientRect(), x = ((event.clientX - rect.left) / rect.width) * box.wide;
      return span[0] + (Math.min(Math.max(x - box.left, 0), box.width) / box.width) * (span[1] - span[0]);
    };

    const hide = () => { tip.hidden = true; box.mark.replaceChildren(); };

    const show = (event) => {
      const wanted = step(event), lines = data.panels.flatMap((panel) => panel.lines);
      const near = lines.map((line) => line.x[nearest(line.x, wanted)]).filter((x) => x >= span[0] && x <= span[1]);
      if (!near.length) return hide();
      const at = near.reduce((a, b) => (Math.abs(a - wanted) <= Math.abs(b - wanted) ? a : b));
      box.mark.replaceChildren();
      make("line", { x1: box.across(at), x2: box.across(at), y1: TOP, y2: HIGH - BOTTOM }, box.mark);
      const rows = [];
      for (const { panel, up } of box.panels)
        for (const line of panel.lines) {
          const i = nearest(line.x, at), gap = line.x.length > 1 ? (line.x.at(-1) - line.x[0]) / (line.x.length - 1) : 0;
          if (Math.abs(line.x[i] - at) > gap) continue;
          paint(make("circle", { cx: box.across(line.x[i]), cy: up(line.y[i]), r: 3.6 }, box.mark), line);
          rows.push([line, i]);
        }
      tip.replaceChildren();
      word("b", place(at), tip);
      for (const [line, i] of rows.slice(0, 16)) {
        const row = word("div", "", tip);
        const where = line.x[i] === at ? "" : ` (${place(line.x[i])})`;
        dot(line, row);
        row.append(`${line.name ? `${line.name}: ` : ""}${write(line.y[i])}${where}`);
      }
      tip.hidden = false;
      const rect = svg.getBoundingClientRect(), around = card.getBoundingClientRect();
      const x = (box.across(at) / box.wide) * rect.width + rect.left - around.left;
      const right = x + 14 + tip.offsetWidth > card.clientWidth;
      tip.style.left = `${Math.max(4, right ? x - 14 - tip.offsetWidth : x + 14)}px`;
      tip.style.top = `${rect.top - around.top + 34}px`;
    };

    let from = null;
    svg.addEventListener("pointerdown", (event) => { from = step(event); held = true; svg.setPointerCapture(event.pointerId); });
    svg.addEventListener("pointermove", (event) => {
      show(event);
      if (!held) return;
      const [low, high] = [from, step(event)].sort((a, b) => a - b);
      box.drag.setAttribute("x", box.across(low));
      box.drag.setAttribute("width", box.across(high) - box.across(low));
    });
    svg.addEventListener("pointerup", (event) => {
      const [low, high] = [from, step(event)].sort((a, b) => a - b);
      held = false;
      if (box.across(high) - box.across(low) > 8) zoom([low, high]);
      box.drag.setAttribute("width", 0);
    });
    svg.addEventListener("pointercancel", () => { held = false; box.drag.setAttribute("width", 0); });
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("dblclick", () => zoom(whole));
    svg.addEventListener("keydown", (event) => { if (event.key === "Escape") zoom(whole); });
    back.addEventListener("click", () => zoom(whole));
    new ResizeObserver(draw).observe(card);
    draw();
    return given.others ? { over: [given, ...given.others].map((data) => data.over), choose } : null;
  };

  const charts = [];
  for (const card of document.querySelectorAll(".curve")) {
    const points = card.querySelector("script");
    if (points) charts.push(chart(card, JSON.parse(points.textContent)));
  }

  const choice = document.querySelector(".choice"), several = charts.filter(Boolean);
  if (choice && several.length) {
    const buttons = [...new Set(several.flatMap((one) => one.over))].map((over) => {
      const button = word("button", over, choice);
      button.type = "button";
      button.addEventListener("click", () => { several.forEach((one) => one.choose(over)); press(button); });
      return button;
    });
    const press = (chosen) => buttons.forEach((button) => button.setAttribute("aria-pressed", button === chosen));
    press(buttons[0]);
    choice.hidden = false;
  }

  const seconds = Number(document.body.dataset.renew);
  if (seconds) setInterval(() => { if (!busy && !document.hidden) location.reload(); }, 1000 * seconds);
})();
