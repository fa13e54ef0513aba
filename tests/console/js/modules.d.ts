/** Vendored libraries whose types are not checked: those of the drawing and of the charts. */
declare module "@dagrejs/dagre";
declare module "uplot";
