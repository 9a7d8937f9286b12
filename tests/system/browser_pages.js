// Opens each case in a frame of its width, looks at it as a reader would, and leaves what it saw as JSON in the page.
(async () => {
  const sleep = (time) => new Promise((done) => setTimeout(done, time));
  const numbers = (colour) => (colour.match(/[\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const contrast = (a, b) => {
    const [high, low] = [light(a), light(b)].sort((x, y) => y - x);
    return (high + 0.05) / (low + 0.05);
  };

  // Only whole colours count: what stands on a mixed one is not looked at.
  const ground = (view, node) => {
    for (let at = node; at; at = at.parentElement) {
      const text = view.getComputedStyle(at).backgroundColor;
      if (!text.startsWith("rgb")) return null;
      const colour = numbers(text);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };

  const unread = (view, page) => {
    const found = new Set();
    for (const node of page.querySelectorAll("main *")) {
      const words = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
      if (!words || node.closest("script") || !node.getClientRects().length) continue;
      const style = view.getComputedStyle(node), colour = numbers(node.closest("svg") ? style.fill : style.color);
      const behind = ground(view, node);
      if (behind && contrast(colour, behind) < 3) found.add(`${node.tagName}.${node.getAttribute("class")}: ${node.textContent.trim().slice(0, 40)}`);
    }
    return [...found].slice(0, 8);
  };

  const wide = (page, most) => [...page.querySelectorAll("main *")]
    .filter((node) => node.getBoundingClientRect().right > most + 1 && !node.parentElement.closest(".scroll, svg, pre"))
    .map((node) => `${node.tagName}.${node.getAttribute("class")}`).slice(0, 8);

  // Words of a chart that stick out of its picture.
  const cut = (page) => [...page.querySelectorAll("svg.chart")].flatMap((svg) => {
    const box = svg.getBoundingClientRect();
    return [...svg.querySelectorAll("text")].filter((text) => {
      const one = text.getBoundingClientRect();
      return text.textContent && (one.left < box.left - 2 || one.right > box.right + 2 || one.top < box.top - 2 || one.bottom > box.bottom + 2);
    }).map((text) => text.textContent);
  });

  // Words of a chart that lie on others.
  const crossed = (page) => [...page.querySelectorAll("svg.chart")].flatMap((svg) => {
    const all = [...svg.querySelectorAll("text")].filter((text) => text.textContent);
    const boxes = all.map((text) => text.getBoundingClientRect());
    return all.flatMap((text, i) => all.slice(i + 1).filter((_, j) => {
      const [a, b] = [boxes[i], boxes[i + 1 + j]];
      return Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3;
    }).map((other) => `${text.textContent} | ${other.textContent}`));
  });

  const look = async (one) => {
    const frame = document.createElement("iframe");
    frame.style.cssText = `border: 0; width: ${one.width}px; height: 900px; color-scheme: light dark`;
    frame.src = one.url;
    const loaded = new Promise((done) => frame.addEventListener("load", done));
    document.body.append(frame);
    await loaded;
    await sleep(300);
    const view = frame.contentWindow, page = frame.contentDocument, root = page.documentElement;
    const over = () => root.scrollWidth - root.clientWidth;
    const cards = [...page.querySelectorAll(".curve")].filter((card) => card.querySelector("script"));
    const seen = {
      page: one.page, width: one.width, inner: view.innerWidth,
      dark: view.matchMedia("(prefers-color-scheme: dark)").matches,
      background: numbers(view.getComputedStyle(page.body).backgroundColor).slice(0, 3),
      overflow: over(), wide: wide(page, root.clientWidth), unread: unread(view, page), cut: cut(page), crossed: crossed(page),
      broken: [...page.images].filter((image) => !image.hidden && !(image.complete && image.naturalWidth)).map((image) => image.alt),
      charts: cards.length,
      drawn: cards.filter((card) => card.querySelector("svg.chart polyline, svg.chart circle") &&
        !/NaN|undefined/.test(card.querySelector("svg.chart").outerHTML)).length,
    };
    const svg = page.querySelector("svg.chart");
    if (svg) {
      const box = svg.getBoundingClientRect();
      svg.dispatchEvent(new view.PointerEvent("pointermove", { clientX: box.left + box.width / 2, clientY: box.top + 90 }));
      seen.tip = page.querySelector(".tip:not([hidden])")?.textContent || "";
      seen.legend = svg.closest(".curve").querySelectorAll(".legend span").length;
    }
    const buttons = [...page.querySelectorAll(".choice button")];
    seen.choices = buttons.map((button) => button.textContent);
    seen.axes = buttons.map((button) => {
      button.click();
      return [...page.querySelector("svg.chart").querySelectorAll("text")].at(-1).textContent;
    });
    const zoom = page.querySelectorAll(".zoom");
    seen.pictures = zoom.length;
    seen.large = [...zoom].every((box) => {
      const image = box.parentElement.querySelector("img"), before = image.getBoundingClientRect().width;
      box.closest("label").click();
      return image.getBoundingClientRect().width > before + 100;
    });
    seen.zoomed = over();
    frame.remove();
    return seen;
  };

  const all = [];
  for (const one of CASES) {
    try { all.push(await look(one)); } catch (error) { all.push({ ...one, error: String(error.stack || error) }); }
  }
  const seen = document.createElement("pre");
  seen.id = "seen";
  seen.textContent = JSON.stringify(all);
  document.body.append(seen);
})();
