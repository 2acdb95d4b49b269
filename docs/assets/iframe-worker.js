// Browsers start no Worker for a page that was opened as a file. This one runs the search of the site in a hidden frame.
// The theme asks for a class of this name, and takes what importScripts returns for a promise then.
window.IFrameWorker = class extends EventTarget {
  constructor(url) {
    super();
    this.onmessage = null;
    this.frame = document.createElement("iframe");
    this.frame.hidden = true;
    document.body.appendChild(this.frame);
    const inner = this.frame.contentWindow;
    inner.document.open();
    inner.document.write("<html><body></body></html>");
    inner.document.close();
    const load = (src) =>
      new Promise((resolve, reject) => {
        const script = inner.document.createElement("script");
        script.src = src;
        script.onload = resolve;
        script.onerror = reject;
        inner.document.body.appendChild(script);
      });
    inner.importScripts = (...urls) => urls.reduce((before, src) => before.then(() => load(src)), Promise.resolve());
    inner.postMessage = (data) => {
      const event = new MessageEvent("message", { data });
      this.dispatchEvent(event);
      if (this.onmessage) this.onmessage(event);
    };
    this.ready = load(url);
  }

  postMessage(data) {
    const inner = this.frame.contentWindow;
    this.ready.then(() => inner.dispatchEvent(new inner.MessageEvent("message", { data })));
  }

  terminate() {
    this.frame.remove();
  }
};
if (location.protocol === "file:") window.Worker = window.IFrameWorker;
