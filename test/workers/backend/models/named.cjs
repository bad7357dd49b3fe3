module.exports = (inputs) => inputs.map((input) => ["default", input]);
module.exports.named = async (inputs) => inputs.map((input) => ["named", input]);
