export { h, s, css, minus, number, duration, section, curvesOf, refreshCharts, ui };
export const chartsNow = () => charts;
export function show(fresh) { data = fresh; }
export function forgetCharts() { charts = []; }
